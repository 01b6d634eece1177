"""The last layer of a decoder for the rows that the head reads, with the keys and values of all rows.

The layer runs twice. The first run ends where attention is called, when keys and values of all rows are known; the
second has the rows of each segment from the first one that is read on. What the first run computed of the queries is
thrown away: that is cheaper than the rest of the layer on rows that nobody reads, and needs no knowledge of its parts.

Shape letters: N computed rows, M rows of the last layer, D width.
"""

from __future__ import annotations

import functools
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import find_reentrant, without_checkpointing
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.kind.packing.attention import PackedMask, ReachedAttention
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches
from sparsebp_cli.errors import UnsupportedError


@final
class LastLayer(ForwardOverride):
    """The ``forward`` of the last layer; it decides by the mask, which activation checkpointing passes again."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        mask = next((value for value in (*args, *kwargs.values()) if isinstance(value, PackedMask)), None)
        read = mask.layout.read if mask is not None and mask.state.shortens else None
        whole = self.is_removed or torch.compiler.is_compiling()
        # Reentrant checkpointing runs a backward of its own, which would go through the keys into earlier layers.
        if whole or mask is None or read is None or find_reentrant(self.module) is not None:
            return self.run_covered(self.module, *args, **kwargs)

        def run(given: PackedMask, row_M: Tensor | None) -> Any:
            def change(value: Any) -> Any:
                if value is mask:
                    return given
                return value if row_M is None else _take(value, mask.layout.num_rows, row_M)

            changed = {name: change(value) for name, value in kwargs.items()}
            return self.run_covered(self.module, *map(change, args), **changed)

        try:
            with without_checkpointing(self.module):  # which would compute the keys again, and end there again
                run(mask.ending_at_attention(), None)
        except ReachedAttention as reached:
            return run(mask.with_keys(reached.key, reached.value), read.row_M)
        raise UnsupportedError(f"{type(self.module).__name__} calls no attention function of transformers")

    def __reduce_ex__(self, _: object) -> Any:
        """Return the plain forward, as of a layer of a model that is not packed."""
        return functools.partial, (type(self.module).forward, self.module)


def install_last_layer(patches: ForwardPatches, stack: nn.Module) -> nn.Module | None:
    """Override the last layer of a stack, and return it; None if something else overrides a part of it."""
    layers = LayerNumbers(stack).layers
    if not layers or any("forward" in module.__dict__ for module in layers[-1].modules()):
        return None
    patches.install(layers[-1], LastLayer(layers[-1]))
    return layers[-1]


def _take(value: Any, num_rows: int, row_M: Tensor) -> Any:
    """Return an argument of a layer for some of its rows."""
    if isinstance(value, (tuple, list)):
        return type(value)(_take(item, num_rows, row_M) for item in value)
    if isinstance(value, dict):
        return {name: _take(item, num_rows, row_M) for name, item in value.items()}
    if not isinstance(value, Tensor) or num_rows not in value.shape:
        return value
    dim = 1 if value.shape[:2] == (1, num_rows) else value.shape.index(num_rows)
    return value.index_select(dim, row_M)
