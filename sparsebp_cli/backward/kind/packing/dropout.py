"""Dropout in front of LoRA's matrices: packed rows get the masks that their positions have in the plain step.

peft drops entries of what its matrices read, and nothing else of the model. The mask of the whole batch is drawn, from
the same generator and in the same order as in the plain step, and each row takes that of its position. Other dropout
stays refused: that of attention weights has one entry for each pair of positions.

Shape letters: B examples, T positions, N computed rows, D width.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from sparsebp_cli.backward.kind.packing.attention import layout_now
from sparsebp_cli.backward.kind.packing.layout import PackedLayout
from sparsebp_cli.backward.observe.module_trace import is_in_backward
from sparsebp_cli.backward.patch.forward import ForwardOverride, ForwardPatches
from sparsebp_cli.errors import UnsupportedError


def find_adapter_dropout(stack: nn.Module) -> list[nn.Dropout]:
    """Return the dropout of LoRA adapters inside of a stack that drops anything."""
    return [
        module
        for name, module in stack.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0.0 and "lora_dropout" in name.split(".")
    ]


@final
class AdapterDropout:
    """The dropout of a model's adapters while its batches are packed."""

    def __init__(self, stack: nn.Module) -> None:
        self._modules = find_adapter_dropout(stack)
        # Activation checkpointing runs a layer again inside of the backward, where no forward is under way: by number
        # of rows, the layouts of the forwards whose backward has not begun; None: of several.
        self._waiting: dict[int, PackedLayout | None] = {}
        self._has_run_again = False

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._modules)

    def install(self, patches: ForwardPatches) -> None:
        """Override the modules."""
        for module in self._modules:
            patches.install(module, _RowDropout(self, module))

    def find_layout(self, x: Tensor) -> PackedLayout | None:
        """Return the layout of the rows that a module reads; None: they are a plain batch."""
        layout = layout_now()
        if layout is None and is_in_backward():
            self._has_run_again = True
            if x.dim() != 3 or len(x) != 1 or x.shape[1] not in self._waiting:
                return None
            layout = self._waiting[x.shape[1]]
            if layout is None:
                raise UnsupportedError(
                    "packing with lora_dropout and activation checkpointing: run the backward of each forward before "
                    "the next one"
                )
            return layout
        if self._has_run_again:
            self._waiting, self._has_run_again = {}, False
        if layout is None:
            return None
        if x.dim() != 3 or x.shape[:2] != (1, layout.num_rows):
            raise UnsupportedError(
                f"packing with lora_dropout reads rows (1, {layout.num_rows}, D), got {tuple(x.shape)}: leave modules "
                "that see some rows alone, such as experts, out of target_modules, or set lora_dropout to 0"
            )
        before = self._waiting.setdefault(layout.num_rows, layout)
        is_same = before is None or before is layout
        if not is_same and before.shape == layout.shape:
            is_same = torch.equal(before.source_N, layout.source_N)
        if not is_same:
            self._waiting[layout.num_rows] = None
        return layout


class _RowDropout(ForwardOverride):
    """The ``forward`` of one dropout module."""

    def __init__(self, owner: AdapterDropout, module: nn.Dropout) -> None:
        self._owner, self._module = owner, module

    def __call__(self, x: Tensor) -> Any:
        """Drop entries of a plain batch, or of packed rows as in the plain batch."""
        module = self._module
        layout = None if self.is_removed or not module.training else self._owner.find_layout(x)
        if layout is None:
            return self.run_covered(module, x)
        # The whole batch's mask, so that the generator stands where the plain step would leave it. See decision 33.
        whole_BTD = torch.ones((*layout.shape, x.shape[-1]), dtype=x.dtype, device=x.device)
        mask_BTD = dropout(whole_BTD, module.p)  # drawn as it is of a plain batch of this shape, type and device
        return x * mask_BTD.flatten(0, 1).index_select(0, layout.source_N)
