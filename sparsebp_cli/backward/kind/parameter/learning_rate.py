"""Learning rates that a parameter selector holds constant for several steps.

This extension sets them only during the optimizer's step. Between two steps the user sees the rates of the learning
rate schedule, and the optimizer's state_dict is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from sparsebp_cli.backward.core.extension import EngineExtension
from sparsebp_cli.backward.kind.parameter.extension import find_parameters
from sparsebp_cli.policy import ParameterSelector

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.core.given import Given

Group = dict[str, Any]


@final
class LearningRates(EngineExtension):
    """The rates that a parameter selector holds in one optimizer."""

    _engine: EngineView

    def __init__(self, policy: ParameterSelector, model: nn.Module, given: Given) -> None:
        self._policy, self._states, optimizer = policy, given.states, given.trained_by
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        self._parameters, _ = find_parameters(model)
        self._held: dict[str, float] = {}  # rate of each group, by its number, at the step whose rate applies
        self._own: list[tuple[Group, float | Tensor]] = []  # the groups during the step, each with the schedule's rate
        self._handles: list[RemovableHandle] = []
        self._enabled = True

    def install(self, engine: EngineView) -> None:
        self._engine = engine
        self._handles = [
            self._optimizer.register_step_pre_hook(lambda *_: self._replace()),
            self._optimizer.register_step_post_hook(lambda *_: self._restore()),
        ]
        engine.notes["learning rate"] = (
            f"{type(self._policy).__name__} sets learning rates, from those of the optimizer"
        )

    def remove(self) -> None:
        self._restore()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def enable(self, enabled: bool) -> None:
        self._enabled = enabled

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the held rates."""
        return {"held_rates": dict(self._held)}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the held rates."""
        self._held = dict(state["held_rates"])

    def _replace(self) -> None:
        """Set the held rates for the optimizer's step."""
        self._restore()  # an earlier step may have raised
        if not self._enabled:
            return
        step = self._states.show(self._policy, replace(self._engine.now(), micro_batch=0, call=0, draw=0, rank=0))
        policy, groups = self._policy.at(step), self._optimizer.param_groups
        # Also update if the optimizer got a new group since.
        if policy.rate_step(self._parameters, step) == step.index or len(self._held) != len(groups):
            self._held = {str(number): float(group["lr"]) for number, group in enumerate(groups)}
        # Only for this step: the log and the optimizer's state_dict have the schedule's rates. See decision 16.
        self._own = [(group, group["lr"]) for group in groups]
        for number, (group, own) in enumerate(self._own):
            rate = self._held[str(number)]
            # Capturable optimizers keep their rate in a tensor.
            group["lr"] = torch.full_like(own, rate) if isinstance(own, Tensor) else rate

    def _restore(self) -> None:
        """Restore the rates of the schedule."""
        for group, own in self._own:
            group["lr"] = own
        self._own = []


def make_rates(policy: ParameterSelector, model: nn.Module, given: Given) -> LearningRates | None:
    """Return the extension that sets a policy's rates; None if it sets none, or without an optimizer."""
    return LearningRates(policy, model, given) if policy.sets_rates and given.optimizer is not None else None
