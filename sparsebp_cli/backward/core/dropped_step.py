"""Steps that a loss scaler drops.

It leaves the optimizer's step out if a gradient is not finite, and lowers its scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from sparsebp_cli.backward.core.clock import Clock
    from sparsebp_cli.backward.core.decision import SiteDecisions
    from sparsebp_cli.backward.core.policy_state import PolicyStates


class ScaledSteps:
    """What policies keep, under a loss scale that falls: then the scaler has dropped the optimizer's step, and the
    residuals, states and observations of before it hold.
    """

    def __init__(self, model: nn.Module, clock: Clock, decisions: SiteDecisions, states: PolicyStates) -> None:
        self._model, self._clock, self._decisions, self._states = model, clock, decisions, states
        self._hook: RemovableHandle | None = None  # none where no loss is scaled
        self._scale: Tensor | float | None = None  # of the last pass; a scaler changes its tensor in place
        self._value = 0.0  # which it had then
        self._restore: Callable[[], None] | None = None  # to before the step

    def start_pass(self, scale: Tensor | float | None) -> None:
        """Begin a pass of training with a scale; None: it has none."""
        if scale is None or not (self._states or self._decisions.feeds_back):
            self._scale = self._restore = None
            return
        if self._hook is None:  # what is decided in a forward is decided about the step that was dropped once more
            self._hook = self._model.register_forward_pre_hook(lambda *_: self.settle())
        value = float(scale)  # waits for the device, as the scaler itself does at each step
        self._take_back(value)
        self._scale, self._value = scale, value
        if self._restore is None or self._clock.micro_batch == 0:
            self._restore = self._remember()

    def settle(self) -> None:
        """Take back what a dropped step left, before a forward, or before the state is saved."""
        # In a graph that is being made, reading the scale would split it.
        if self._scale is not None and self._may_be_dropped and not torch.compiler.is_compiling():
            self._take_back(float(self._scale))

    def stop(self) -> None:
        """Remove the hook on the model."""
        if self._hook is not None:
            self._hook.remove()

    @property
    def _may_be_dropped(self) -> bool:
        # Where the optimizer has stepped since, the scale fell by the script's own choice.
        # Without one each pass is a step, and only a scaler's own scale falls for no other reason.
        if self._clock.follows_optimizer:
            return self._clock.micro_batch > 0
        return isinstance(self._scale, Tensor)

    def _take_back(self, value: float) -> None:
        if self._restore is not None and value < self._value and self._may_be_dropped:
            self._restore()
            self._restore = None
            self._clock.go_to(self._clock.index, 0)  # the step begins again

    def _remember(self) -> Callable[[], None]:
        residuals, restore_states = dict(self._decisions.residuals), self._states.remember()

        def restore() -> None:
            self._decisions.residuals = residuals
            restore_states()

        return restore
