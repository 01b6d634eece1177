"""Steps that a loss scaler drops: if a gradient is not finite, it skips the optimizer's step and lowers its scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from sparsebp_cli.backward.core.clock import Clock
    from sparsebp_cli.backward.core.policy_state import PolicyStates


class ScaledSteps:
    """Restores states and observations of policies if the loss scale falls, because the scaler then dropped the
    optimizer's step.
    """

    def __init__(self, model: nn.Module, clock: Clock, states: PolicyStates) -> None:
        self._model, self._clock, self._states = model, clock, states
        self._hook: RemovableHandle | None = None  # None as long as no loss is scaled
        self._scale: Tensor | float | None = None  # scale of the last pass; a scaler changes its tensor in place
        self._value = 0.0  # value of the scale in the last pass
        self._restore: Callable[[], None] | None = None  # restores the state before the step

    def start_step(self) -> None:
        """Remember the states before the first forward of a step, which may be measured."""
        self._restore = self._states.remember() if self._states else None

    def start_pass(self, scale: Tensor | float | None) -> None:
        """Begin a pass of training with a scale; None: the loss is not scaled."""
        if scale is None or not self._states:
            self._scale = None
            return
        if self._hook is None:  # decisions in a forward must come after the restore, since they repeat the dropped step
            self._hook = self._model.register_forward_pre_hook(lambda *_: self.settle())
        value = float(scale)  # waits for the device; the scaler does so at each step, too
        self._take_back(value)
        self._scale, self._value = scale, value

    def settle(self) -> None:
        """Undo the effects of a dropped step, before a forward or before the state is saved."""
        # Reading the scale while torch.compile traces would split the graph.
        if self._scale is not None and self._may_be_dropped and not torch.compiler.is_compiling():
            self._take_back(float(self._scale))

    def stop(self) -> None:
        """Remove the hook on the model."""
        if self._hook is not None:
            self._hook.remove()

    @property
    def _may_be_dropped(self) -> bool:
        # If the optimizer has stepped since, the script lowered the scale itself. Without an optimizer each pass is a
        # step; then a falling scale proves a dropped step only if it is a scaler's tensor.
        if self._clock.follows_optimizer:
            return self._clock.micro_batch > 0
        return isinstance(self._scale, Tensor)

    def _take_back(self, value: float) -> None:
        if self._restore is not None and value < self._value and self._may_be_dropped:
            self._restore()
            self._clock.go_to(self._clock.index, 0)  # the step begins again
