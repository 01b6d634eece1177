"""Learning rates that a parameter selector sets: by parameter, or constant for several steps.

Only during the optimizer's step, this extension replaces its groups by groups of equal rates. Between two steps the
user sees the rates of the learning rate schedule, and the optimizer's state_dict is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from sparsebp_cli.backward.core.extension import EngineExtension
from sparsebp_cli.backward.kind.parameter.extension import find_parameters
from sparsebp_cli.backward.observe.internals import parameter_of
from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import ParameterSelector

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineView
    from sparsebp_cli.backward.core.given import Given

Group = dict[str, Any]


@final
class LearningRates(EngineExtension):
    """The rates of a parameter selector in one optimizer."""

    _engine: EngineView

    def __init__(self, policy: ParameterSelector, model: nn.Module, given: Given) -> None:
        self._policy, self._states, optimizer = policy, given.states, given.trained_by
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        self._parameters, self._places = find_parameters(model)
        self._held: dict[str, float] = {}  # rate of each group, by its number, at the step whose rate applies
        self._given: list[Group] = []  # the optimizer's own groups during its step
        self._shown: list[tuple[Group, Group]] = []  # replacement groups, each with the original group
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
        """Replace the optimizer's groups for its step."""
        self._restore()  # an earlier step may have raised
        if not self._enabled:
            return
        step = self._states.show(self._policy, replace(self._engine.now(), micro_batch=0, call=0, draw=0, rank=0))
        policy, groups = self._policy.at(step), self._optimizer.param_groups
        # Also update if the optimizer got a new group since.
        if policy.rate_step(self._parameters, step) == step.index or len(self._held) != len(groups):
            self._held = {str(number): float(group["lr"]) for number, group in enumerate(groups)}
        factors = self._factors(policy.rates(self._parameters, step))
        self._given = groups
        self._shown = [
            (shown, group)
            for number, group in enumerate(groups)
            for shown in _split(group, self._held[str(number)], factors)
        ]
        # Only for this step: schedules, the log and the optimizer's state_dict use the user's groups. See decision 16.
        self._optimizer.param_groups = [shown for shown, _ in self._shown]

    def _restore(self) -> None:
        """Restore the optimizer's groups, with the values that its step wrote into the replacements."""
        if not self._given:
            return
        for shown, group in self._shown:
            group |= {name: value for name, value in shown.items() if name not in ("params", "lr")}
        self._optimizer.param_groups, self._given, self._shown = self._given, [], []

    def _factors(self, rates: Mapping[str, float]) -> dict[nn.Parameter, float]:
        for name, rate in rates.items():
            if name not in self._places or not 0.0 <= rate < float("inf"):
                raise PolicyError(
                    f"{type(self._policy).__name__}: rates must be numbers of at least 0 by names it was given, got "
                    f"{name!r}: {rate!r}"
                )
        return {parameter_of(*self._places[name]): rate for name, rate in rates.items()}


def make_rates(policy: ParameterSelector, model: nn.Module, given: Given) -> LearningRates | None:
    """Return the extension that sets a policy's rates; None if it sets none, or without an optimizer."""
    return LearningRates(policy, model, given) if policy.sets_rates and given.optimizer is not None else None


def _split(group: Group, rate: float, factors: Mapping[nn.Parameter, float]) -> Sequence[Group]:
    """Return a group split into groups of equal rates, in the order of its parameters."""
    by_factor: dict[float, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        by_factor.setdefault(factors.get(parameter, 1.0), []).append(parameter)
    own = group["lr"]
    return [
        {
            **group,
            "params": parameters,
            # Capturable optimizers keep their rate in a tensor.
            "lr": torch.full_like(own, rate * factor) if isinstance(own, Tensor) else rate * factor,
        }
        for factor, parameters in by_factor.items()
    ]
