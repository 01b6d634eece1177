"""The last layer of a decoder for the rows that the head reads, with the keys and values of all rows.

The layer runs twice. The first run ends at the attention call, when keys and values of all rows are known. The second
run has only the rows that are read. The first run's queries and the second run's keys and values are not used. If
``decoder/layout.py`` knows the layer's class, the layer skips these products. For other classes, this waste still costs
less than the rest of the layer on rows that are not read, and needs no knowledge of the layer's parts.

Shape letters: N computed rows, M rows of the last layer, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import find_reentrant, without_checkpointing
from sparsebp_cli.backward.decoder.kv_cache import skip_outputs
from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.backward.decoder.layout import AttentionLayout, find_attention, find_layouts
from sparsebp_cli.backward.kind.packing.attention import PackedMask, ReachedAttention
from sparsebp_cli.backward.kind.packing.layout import MAX_READ
from sparsebp_cli.backward.patch.forward import ForwardPatches, ModuleOverride, replace_forwards
from sparsebp_cli.errors import UnsupportedError


@final
class LastLayer(ModuleOverride):
    """The ``forward`` of the last layer; it decides by the mask, which activation checkpointing passes again."""

    skips: bool
    spreads: bool
    num_calls: int

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        known = find_attention(module, find_layouts({type(module).__name__}))
        self._core: nn.Module | None = None
        self._layout: AttentionLayout | None = None
        if known is not None and not known[1].fused:  # a linear that computes q, k and v is needed in both runs
            self._core, self._layout = known
        self.skips = self._layout is not None  # whether to skip linears whose output is not used
        # Whether to pad the output with zeros to all rows, for a model that reshapes it to the batch, such as GPT-2.
        self.spreads = False
        self.num_calls = 1  # attention calls in the layer

    @property
    def ways(self) -> Sequence[tuple[bool, bool]]:
        """Combinations of ``skips`` and ``spreads`` to try, the least work first."""
        skips = (False,) if self._layout is None else (True, False)
        return [(skip, spread) for spread in (False, True) for skip in skips]

    @property
    def most_read(self) -> float:
        """Largest fraction of rows that are read at which the layer runs only these."""
        return 1.0 if self.skips else MAX_READ

    @property
    def all_rows(self) -> frozenset[nn.Module]:
        """Its modules that run on all rows. The others run on the rows that are read."""
        attention = self._core or next((m for m in self.module.modules() if hasattr(m, "is_causal")), None)
        if attention is None:
            return frozenset()
        if self._layout is None or not self.skips:
            return frozenset(attention.modules())
        children = [getattr(attention, name, None) for name in self._layout.key_value]
        return frozenset(m for child in children if child is not None for m in child.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        mask = next((value for value in (*args, *kwargs.values()) if isinstance(value, PackedMask)), None)
        read = mask.layout.read if mask is not None and mask.state.shortens else None
        whole = self.is_removed or torch.compiler.is_compiling()
        # Reentrant checkpointing runs its own backward, which would continue through the keys into earlier layers.
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
            with ExitStack() as stack:
                # Checkpointing would compute the keys again, and end there again.
                stack.enter_context(without_checkpointing(self.module))
                self._skip(stack, () if self._layout is None else self._layout.query)
                run(mask.ending_at_attention(self.num_calls), None)
        except ReachedAttention as reached:
            with ExitStack() as stack:
                self._skip(stack, () if self._layout is None else self._layout.key_value)
                output = run(mask.with_keys(reached.keys), read.row_M)
            return _spread(output, mask.layout.num_rows, read.row_M) if self.spreads else output
        raise UnsupportedError(f"lossless does not support {type(self.module).__name__}, which calls no attention")

    def _skip(self, stack: ExitStack, names: Sequence[str]) -> None:
        if self.skips and self._core is not None:
            stack.enter_context(replace_forwards(skip_outputs(self._core, names)))


def install_last_layer(patches: ForwardPatches, stack: nn.Module) -> LastLayer | None:
    """Override the last layer of a stack, and return the override; None if other code overrides a part of the layer."""
    layers = LayerNumbers(stack).layers
    if not layers or any("forward" in module.__dict__ for module in layers[-1].modules()):
        return None
    override = LastLayer(layers[-1])
    patches.install(layers[-1], override)
    return override


def find_shares(stack: nn.Module, head: nn.Module | None) -> tuple[float, float]:
    """Return the fractions of a model's multiplications in the head and in the last layer, from weight sizes."""

    def count(*modules: nn.Module) -> int:
        return sum(p.numel() for module in modules for p in module.parameters() if p.dim() > 1)

    layers = LayerNumbers(stack).layers
    above = 0 if head is None else count(head)
    total = max(count(*layers) + above, 1)
    return above / total, count(*layers[-1:]) / total


def _take(value: Any, num_rows: int, row_M: Tensor) -> Any:
    """Return an argument of a layer, restricted to some of its rows."""
    if isinstance(value, (tuple, list)):
        return type(value)(_take(item, num_rows, row_M) for item in value)
    if isinstance(value, dict):
        return {name: _take(item, num_rows, row_M) for name, item in value.items()}
    if not isinstance(value, Tensor) or num_rows not in value.shape:
        return value
    dim = 1 if value.shape[:2] == (1, num_rows) else value.shape.index(num_rows)
    return value.index_select(dim, row_M)


def _spread(value: Any, num_rows: int, row_M: Tensor) -> Any:
    """Return a layer's output for some rows, padded with zeros to all rows."""
    if isinstance(value, tuple):
        return (_spread(value[0], num_rows, row_M), *value[1:])
    return value.new_zeros(1, num_rows, *value.shape[2:]).index_copy(1, row_M, value)
