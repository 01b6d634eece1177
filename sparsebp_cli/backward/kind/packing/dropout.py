"""Dropout before LoRA's matrices: packed rows get the masks of their positions in the plain step.

peft applies this dropout only to the inputs of its matrices. This module draws the mask of the whole batch, from the
same generator and in the same order as the plain step, and each row uses the mask of its position. Packing refuses
other dropout, since dropout of attention weights has one entry for each pair of positions.

Shape letters: B examples, T positions, N computed rows, D width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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
from sparsebp_cli.errors import UnsupportedError, UsageError


def find_adapter_dropout(stack: nn.Module) -> list[nn.Dropout]:
    """Return the dropout modules of LoRA adapters inside a stack whose rate is above 0."""
    return [
        module
        for name, module in stack.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0.0 and "lora_dropout" in name.split(".")
    ]


def find_rate(module: nn.Module) -> float:
    """Return the largest dropout rate of a module. Some adapters of peft have a rate for each name of an adapter."""
    rates = [
        rate for value in _find_rates(module) for rate in (value.values() if isinstance(value, dict) else (value,))
    ]
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def _find_rates(module: nn.Module) -> list[Any]:
    found = [value for name, value in vars(module).items() if "drop" in name]
    return found + ([getattr(module, "p", 0.0)] if "Dropout" in type(module).__name__ else [])


@final
class LaterDropout:
    """Notices dropout that the script adds or turns on after the model was attached, such as that of a new adapter."""

    def __init__(self, model: nn.Module, known: Collection[nn.Module]) -> None:
        self._model, self._known = model, set(known)
        self._read()

    def _read(self) -> None:
        modules = [(name, module) for name, module in self._model.named_modules() if module not in self._known]
        self._modules = [(name, module) for name, module in modules if _find_rates(module)]
        self._children = [(m._modules, [*m._modules.values()]) for m in self._model.modules()]  # noqa: SLF001

    def check(self) -> None:
        """Raise :class:`UsageError` if a module has dropout that it did not have."""
        if any([*children.values()] != before for children, before in self._children):
            self._read()
        for name, module in self._modules:
            if (rate := find_rate(module)) > 0.0:
                raise UsageError(
                    f"{name!r} got dropout {rate:g} after the model was attached, but lossless reads dropout only at "
                    "attach: set it to 0, or call engine.detach() and attach the model again"
                )


class WaitingRows(Enum):
    """The owner of a number of rows, if it is not a single packed batch."""

    PLAIN = 1  # a plain batch of one example
    SEVERAL = 2  # several batches with different layouts


@final
class AdapterDropout:
    """The dropout of a model's adapters while its batches are packed."""

    def __init__(self, stack: nn.Module) -> None:
        self._modules = find_adapter_dropout(stack)
        # The first module that can be checkpointed represents all, since transformers gives them the same setting.
        self._checkpointed = next((m for m in stack.modules() if hasattr(m, "gradient_checkpointing")), None)
        # Activation checkpointing reruns a layer inside the backward, outside of any forward. So this maps a number of
        # rows to its layout in the forwards whose backward has not begun.
        self._waiting: dict[int, PackedLayout | WaitingRows] = {}
        self._has_run_again = False

    @property
    def modules(self) -> Collection[nn.Module]:
        """The modules whose dropout is supported."""
        return self._modules

    def __bool__(self) -> bool:
        """Whether there is any such dropout."""
        return bool(self._modules)

    def install(self, patches: ForwardPatches) -> None:
        """Override the modules."""
        for module in self._modules:
            patches.install(module, _RowDropout(self, module))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Set aside the layouts that wait for their backward, while a comparison runs its own passes."""
        before = self._waiting, self._has_run_again
        self._waiting, self._has_run_again = {}, False
        try:
            yield
        finally:
            self._waiting, self._has_run_again = before

    def find_layout(self, x: Tensor) -> PackedLayout | None:
        """Return the layout of the rows that a module reads; None for a plain batch."""
        layout = layout_now()
        if layout is None and is_in_backward():
            self._has_run_again = True
            waiting = (
                self._waiting.get(x.shape[1], WaitingRows.PLAIN) if x.dim() == 3 and len(x) == 1 else WaitingRows.PLAIN
            )
            if waiting is WaitingRows.SEVERAL:
                raise UnsupportedError(
                    "lossless with lora_dropout and activation checkpointing needs the backward of each forward "
                    "before the next forward: change the order"
                )
            return None if isinstance(waiting, WaitingRows) else waiting
        if self._has_run_again:
            self._waiting, self._has_run_again = {}, False
        if layout is None:
            # A forward without gradient does not run again, except under reentrant checkpointing.
            if x.dim() == 3 and len(x) == 1 and (torch.is_grad_enabled() or is_reentrant(self._checkpointed)):
                self._wait(x.shape[1], WaitingRows.PLAIN)
            return None
        if x.dim() != 3 or x.shape[:2] != (1, layout.num_rows):
            raise UnsupportedError(
                f"lossless with lora_dropout needs inputs (1, {layout.num_rows}, D), got {tuple(x.shape)}: set "
                "lora_dropout to 0, or leave modules that get only some positions (experts) out of target_modules"
            )
        self._wait(layout.num_rows, layout)
        return layout

    def _wait(self, num_rows: int, new: PackedLayout | WaitingRows) -> None:
        """Remember the layout of a number of rows until they run again."""
        before = self._waiting.setdefault(num_rows, new)
        if before is new:
            return
        is_alike = isinstance(before, PackedLayout) and isinstance(new, PackedLayout) and before.has_rows_of(new)
        if not is_alike:
            self._waiting[num_rows] = WaitingRows.SEVERAL


class _RowDropout(ForwardOverride):
    """The ``forward`` of one dropout module."""

    def __init__(self, owner: AdapterDropout, module: nn.Dropout) -> None:
        self._owner, self._module = owner, module

    def __call__(self, x: Tensor) -> Any:
        """Apply dropout to a plain batch, or to packed rows with the masks of the plain batch."""
        module = self._module
        layout = None if self.is_removed or not module.training else self._owner.find_layout(x)
        if layout is None:
            return self.run_covered(module, x)
        # Draw the whole batch's mask, so that the generator ends in the state of the plain step. See decision 33.
        whole_BTD = torch.ones((*layout.shape, x.shape[-1]), dtype=x.dtype, device=x.device)
        mask_BTD = dropout(whole_BTD, module.p)  # the same draw as for a plain batch of this shape, dtype and device
        return x * mask_BTD.flatten(0, 1).index_select(0, layout.source_N)
