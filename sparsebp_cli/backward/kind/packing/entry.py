"""The first layer of a stack that embeds the plain batch: it selects the rows to compute.

Shape letters: B examples, T positions, N computed rows, D width.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from sparsebp_cli.backward.decoder.decoder import argument_names, bind_arguments
from sparsebp_cli.backward.kind.packing.attention import find_mask
from sparsebp_cli.backward.patch.forward import ModuleOverride


@final
class PackedEntry(ModuleOverride):
    """The ``forward`` of the first layer; it decides by the mask, which activation checkpointing passes again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on (1, N, D) instead of (B, T, D)."""
        mask = find_mask(args, kwargs)
        if self.is_removed or mask is None:
            return self.run_covered(self.module, *args, **kwargs)
        given = bind_arguments(self.module, args, kwargs)
        first = argument_names(self.module)[0]
        hidden = given[first]
        assert isinstance(hidden, Tensor)
        rows = hidden.flatten(0, 1).index_select(0, mask.layout.source_N)[None]
        return self.run_covered(self.module, **given | {first: rows})
