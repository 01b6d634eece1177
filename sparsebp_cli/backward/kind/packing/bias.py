"""A learned bias of relative positions, as T5 and its family add it to the scores of attention, for packed rows.

The layer would compute it for all pairs of rows. Here it is computed for the positions of the plain batch, once as in
the plain forward, and each group of segments takes its own.

Shape letters: T positions, H heads, G segments of a group, L queries of a segment, K its keys.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, cast, final

from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import bind_arguments
from sparsebp_cli.backward.kind.packing.attention import PackedBias, find_mask
from sparsebp_cli.backward.patch.forward import ForwardOverride
from sparsebp_cli.errors import UnsupportedError


@final
class BiasedAttention(ForwardOverride):
    """The ``forward`` of an attention module that has such a bias, or that gets the one of an earlier layer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; with packed rows the bias is given, so that the module computes none."""
        mask = find_mask(args, kwargs)
        if self.is_removed or mask is None:
            return self.run_covered(self.module, *args, **kwargs)
        given = bind_arguments(self.module, args, kwargs)
        if given.get("position_bias") is None:
            given["position_bias"] = PackedBias(self._compute(mask.layout.shape[1]))
        return self.run_covered(self.module, **given)

    def _compute(self, num_positions: int) -> Tensor | None:
        """Return the bias (H, T, T); None: of zeros."""
        if not cast("Any", self.module).has_relative_attention_bias:
            return None
        bias_1HTT: Tensor = cast("Any", self.module).compute_bias(num_positions, num_positions)
        return bias_1HTT[0]

    def __reduce_ex__(self, _: object) -> Any:
        """Return the plain forward, as of a model that is not packed."""
        return functools.partial, (type(self.module).forward, self.module)


def find_biased(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a model that add a bias; raise if one cannot be given it."""
    found = [module for module in model.modules() if hasattr(module, "has_relative_attention_bias")]
    found = [module for module in found if hasattr(module, "compute_bias")]
    for module in found:
        if "position_bias" not in inspect.signature(type(module).forward).parameters:
            raise UnsupportedError(
                f"{type(module).__name__} computes a bias of positions for all pairs of its rows: they cannot be packed"
            )
    return found
