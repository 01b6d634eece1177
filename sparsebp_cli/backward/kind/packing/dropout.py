"""Dropout in front of LoRA's matrices: packed rows get the masks that their positions have in the plain step.

peft drops entries of what its matrices read, and nothing else of the model. The mask of the whole batch is drawn, from
the same generator and in the same order as in the plain step, and each row takes that of its position. Other dropout
stays refused: that of attention weights has one entry for each pair of positions.

Shape letters: B examples, T positions, N computed rows, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from sparsebp_cli.backward.decoder.decoder import is_reentrant
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


class Rows(Enum):
    """What has a number of rows, where it is no single packed batch."""

    PLAIN = 1  # a plain batch of one example
    SEVERAL = 2  # batches that are not arranged alike


@final
class AdapterDropout:
    """The dropout of a model's adapters while its batches are packed."""

    def __init__(self, stack: nn.Module) -> None:
        self._modules = find_adapter_dropout(stack)
        # The first module that can be checkpointed speaks for all: transformers sets them alike.
        self._checkpointed = next((m for m in stack.modules() if hasattr(m, "gradient_checkpointing")), None)
        # Activation checkpointing runs a layer again inside of the backward, where no forward is under way: by number
        # of rows, what had them in the forwards whose backward has not begun.
        self._waiting: dict[int, PackedLayout | Rows] = {}
        self._has_run_again = False

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._modules)

    def install(self, patches: ForwardPatches) -> None:
        """Override the modules."""
        for module in self._modules:
            patches.install(module, _RowDropout(self, module))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep what waits for its backward, while a comparison runs forwards and backwards of its own."""
        before = self._waiting, self._has_run_again
        self._waiting, self._has_run_again = {}, False
        try:
            yield
        finally:
            self._waiting, self._has_run_again = before

    def find_layout(self, x: Tensor) -> PackedLayout | None:
        """Return the layout of the rows that a module reads; None: they are a plain batch."""
        layout = layout_now()
        if layout is None and is_in_backward():
            self._has_run_again = True
            waiting = self._waiting.get(x.shape[1], Rows.PLAIN) if x.dim() == 3 and len(x) == 1 else Rows.PLAIN
            if waiting is Rows.SEVERAL:
                raise UnsupportedError(
                    "packing with lora_dropout and activation checkpointing: run the backward of each forward before "
                    "the next one"
                )
            return None if isinstance(waiting, Rows) else waiting
        if self._has_run_again:
            self._waiting, self._has_run_again = {}, False
        if layout is None:
            # A reentrant forward has no gradient either, but runs again; a generation does not.
            if x.dim() == 3 and len(x) == 1 and (torch.is_grad_enabled() or is_reentrant(self._checkpointed)):
                self._wait(x.shape[1], Rows.PLAIN)
            return None
        if x.dim() != 3 or x.shape[:2] != (1, layout.num_rows):
            raise UnsupportedError(
                f"packing with lora_dropout reads rows (1, {layout.num_rows}, D), got {tuple(x.shape)}: leave modules "
                "that see some rows alone, such as experts, out of target_modules, or set lora_dropout to 0"
            )
        self._wait(layout.num_rows, layout)
        return layout

    def _wait(self, num_rows: int, new: PackedLayout | Rows) -> None:
        """Remember what has so many rows until they run again."""
        before = self._waiting.setdefault(num_rows, new)
        if before is new:
            return
        is_alike = isinstance(before, PackedLayout) and isinstance(new, PackedLayout) and before.has_rows_of(new)
        if not is_alike:
            self._waiting[num_rows] = Rows.SEVERAL


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
