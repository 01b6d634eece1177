"""The learned relative position bias that T5 and its family add to attention scores, for packed rows.

The layer would compute it for all pairs of rows. This module computes it once for the positions of the plain batch,
like the plain forward, and each group of segments selects its part.

Shape letters: T positions, H heads, G segments of a group, L queries of a segment, K its keys.
"""

from __future__ import annotations

import inspect
from typing import Any, cast, final

from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import bind_arguments
from sparsebp_cli.backward.kind.packing.attention import PackedBias, find_mask
from sparsebp_cli.backward.patch.forward import ModuleOverride
from sparsebp_cli.errors import UnsupportedError


@final
class BiasedAttention(ModuleOverride):
    """The ``forward`` of an attention module with such a bias, its own or an earlier layer's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. With packed rows, pass it the bias, so that it computes none."""
        mask = find_mask(args, kwargs)
        if self.is_removed or mask is None:
            return self.run_covered(self.module, *args, **kwargs)
        given = bind_arguments(self.module, args, kwargs)
        if given.get("position_bias") is None:
            given["position_bias"] = PackedBias(self._compute(mask.layout.shape[1]))
        return self.run_covered(self.module, **given)

    def _compute(self, num_positions: int) -> Tensor | None:
        """Return the bias (H, T, T); None: zeros."""
        if not cast("Any", self.module).has_relative_attention_bias:
            return None
        bias_1HTT: Tensor = cast("Any", self.module).compute_bias(num_positions, num_positions)
        return bias_1HTT[0]


def find_biased(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a model that add a bias. Raise UnsupportedError if one cannot receive it."""
    found = [module for module in model.modules() if hasattr(module, "has_relative_attention_bias")]
    found = [module for module in found if hasattr(module, "compute_bias")]
    for module in found:
        if "position_bias" not in inspect.signature(type(module).forward).parameters:
            raise UnsupportedError(
                f"lossless does not support {type(module).__name__}, which computes a position bias for all pairs of "
                "positions and has no argument position_bias"
            )
    return found
