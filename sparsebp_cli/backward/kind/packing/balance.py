"""The loss that balances the experts of a mixture (``aux_loss``), over the computed rows.

The plain step averages it over all positions that the attention mask does not hide. Here each row counts once for each
of its positions, so a shared prefix counts once for each of its examples. The model's own function computes the loss:
transformers weighs positions by the attention mask, and receives these counts instead of the mask.

The loss reads all these positions, so packing skips none after the last label, and the last layer runs all rows.

Shape letters: B examples, T positions, N computed rows, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.kind.packing.groups import Bools
from sparsebp_cli.backward.kind.packing.layout import PackedLayout
from sparsebp_cli.backward.patch.boundary import fill
from sparsebp_cli.errors import UnsupportedError

OPTION = "output_router_logits"  # an option of the configuration, and an argument of the forward


def balances_experts(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether a forward with these arguments computes the loss that balances experts."""
    asked = given.get(OPTION)
    return bool(getattr(model.config, OPTION, False) if asked is None else asked)


def find_coefficient(model: nn.Module) -> float | None:
    """Return the factor of that loss in the model's own forward; None: the model has no such loss."""
    config: Any = model.config
    for place in (model, config.get_text_config()):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            value = getattr(place, name, None)
            if isinstance(value, (int, float)):
                return float(value)
    return None


def count_positions(layout: PackedLayout, real_BT: Bools) -> Tensor:
    """Return for each row its number of positions that are not padding, (N,)."""
    counted_BT = torch.from_numpy(real_BT).to(layout.row_BT.device) & layout.computed_BT
    count_N = torch.zeros(layout.num_rows, dtype=torch.long, device=layout.row_BT.device)
    return count_N.index_add_(0, layout.row_BT.flatten(), counted_BT.flatten().long())


def spread_routers(output: Any, layout: PackedLayout) -> dict[str, tuple[Tensor, ...]]:
    """Return the routers' logits in the shape of the plain forward, (B * T, E) for each layer, if the output has any.

    A gradient at a position without a row, which is padding, raises an error.
    """
    routers = getattr(output, "router_logits", None)
    if routers is None:
        return {}
    spread = []
    for logits in routers:
        rows_NE = logits.reshape(-1, logits.shape[-1])
        if rows_NE.shape[0] != layout.num_rows:
            raise UnsupportedError(f"lossless needs {layout.num_rows} rows of router logits, got {rows_NE.shape[0]}")
        values_BTE = rows_NE.index_select(0, layout.row_BT.flatten()).view(*layout.shape, -1)
        whole_BTE = fill(values_BTE, layout.computed_BT, "logits of routers")
        spread.append(whole_BTE.flatten(0, 1) if logits.dim() == 2 else whole_BTE)
    return {"router_logits": tuple(spread)}
