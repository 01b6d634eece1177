"""The states of policies. The engine stores them, and updates them with the observations of each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from sparsebp_cli.backward.core.loss_scale import remove_scale
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Measure, Observation, Observed, ParameterGradient, Policy, Stateful, Step, TrialPass

Values = Mapping[str, Tensor | float]
_OBSERVED = "observed"


@final
class PolicyStates:
    """The states of the stateful policies of an engine, by the policy's number among all policies.

    ``policies`` lists all policies with the places where they decide. ``gradients`` returns the gradients of trained
    parameters by name. Raises :class:`UsageError` if ``init`` returns anything but tensors and numbers.
    """

    def __init__(
        self,
        policies: Sequence[tuple[Policy, Sequence[Any]]] = (),
        gradients: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self._policies = {str(n): policy for n, (policy, _) in enumerate(policies) if isinstance(policy, Stateful)}
        self._numbers = {id(policy): number for number, policy in self._policies.items()}
        self._states = {n: _check(policy, policy.init(policies[int(n)][1])) for n, policy in self._policies.items()}
        self._observed: dict[str, Observation] = {}  # observations of the current step, by policy
        self._gradients = gradients
        self._trial: _Trial | None = None
        self._device: torch.device | None = None
        self.loss_scale: Tensor | float | None = None  # loss scale of the running pass, or of the last one

    def __bool__(self) -> bool:
        """Whether a policy has state."""
        return bool(self._policies)

    def of(self, policy: Policy) -> Values:
        """Return the state of a policy; empty if it has none."""
        number = self._numbers.get(id(policy))
        return {} if number is None else self._states[number]

    def show(self, policy: Policy, step: Step) -> Step:
        """Return the step with the policy's state, for its decision."""
        return replace(step, state=self.of(policy))

    def move(self, device: torch.device) -> None:
        """Move all states to the model's device, if they are on another."""
        if device != self._device:
            self._states = {number: _to(values, device) for number, values in self._states.items()}
            self._observed = _map(lambda value: value.to(device), self._observed)
            self._device = device

    def watches(self, policy: Policy, what: type[Observed]) -> bool:
        """Return whether a policy observes a class in the running pass. With trials it observes only trial passes."""
        if not isinstance(policy, Stateful) or what not in policy.observes:
            return False
        is_tried = self._trial is not None and self._trial.number == self._numbers[id(policy)]
        return is_tried if policy.has_trials else self._trial is None

    def see(self, policy: Policy, seen: Observed, step: Step | None = None) -> None:
        """Measure an object that the policy watches, and fold in the measures. In a trial pass ``step`` is ignored."""
        assert isinstance(policy, Stateful)
        number, trial = self._numbers[id(policy)], self._trial
        if trial is not None:
            self._measure(policy, [seen], trial.step, trial.observation)
            return
        assert step is not None
        if not step.draw:  # probes must leave no trace
            self._measure(policy, [seen], step, self._observed.setdefault(number, Observation()))

    def unscale(self, gradient: Tensor) -> Tensor:
        """Return a gradient of the running pass divided by the loss scale."""
        return gradient if self.loss_scale is None else remove_scale(gradient, self.loss_scale)

    def next_forward(self, policy: Policy) -> str:
        """Return the name of the next forward of the step: its number after the forwards that the policy measured."""
        before = self._observed.get(self._numbers[id(policy)], Observation())
        return str(max((int(name) for values in before.values() for name in values), default=-1) + 1)

    @torch.no_grad()
    def _measure(self, policy: Policy, shown: Iterable[Observed], step: Step, into: Observation) -> None:
        step, policy = self.show(policy, step), policy.at(step)
        assert isinstance(policy, Stateful)
        for seen in shown:
            measures = policy.measure(seen, step)
            _check_measures(policy, measures)
            # Copy, because a policy may return the tensor that it received, which belongs to the caller.
            own = {
                name: replace(
                    measure,
                    # The caller has divided by the loss scale; without a scale this only replaces values that are not
                    # finite by 0. See decision 103.
                    value=remove_scale(measure.value, None) if seen.is_gradient else measure.value.detach().clone(),
                )
                for name, measure in measures.items()
            }
            into.add(seen.name, own)

    @contextmanager
    def trying(self, policy: Policy, step: Step, state: Values | None) -> Iterator[None]:
        """Use another state of a policy during a trial pass, and collect its observations of the pass."""
        number = self._numbers[id(policy)]
        before = self._states[number]
        assert isinstance(policy, Stateful)
        self._trial = _Trial(number, step)
        self._states[number] = before if state is None else _check(policy, state, before)
        try:
            yield
        finally:
            self._states[number], self._trial = before, None

    def end_step(self, step: Step) -> None:
        """Update the states with the observations of the step."""
        if not self._policies:
            return
        observed, self._observed = self._observed, {}
        with torch.no_grad():
            for number, policy in self._policies.items():
                observation = observed.get(number, Observation())
                if self.watches(policy, ParameterGradient):
                    # If there is a scaler, it has divided these gradients already.
                    shown = (ParameterGradient(name, gradient) for name, gradient in self._gradients().items())
                    self._measure(policy, shown, step, observation)
                self._replace(number, policy.at(step).observe(self._states[number], observation, step))

    def wanted(self, policy: Policy, step: Step) -> Sequence[Collection[str] | TrialPass]:
        """Return the trial passes that a policy requests before a step."""
        return policy.at(step).wants_trials(self.show(policy, step)) if isinstance(policy, Stateful) else ()

    def end_trial(self, policy: Policy) -> Observation:
        """Return the policy's observation of the trial pass, with its measures of the parameters' gradients."""
        assert isinstance(policy, Stateful)
        assert self._trial is not None
        if self.watches(policy, ParameterGradient):
            # No step follows a trial pass, so no scaler divides its gradients.
            shown = (ParameterGradient(name, self.unscale(value)) for name, value in self._gradients().items())
            self._measure(policy, shown, self._trial.step, self._trial.observation)
        return self._trial.observation

    def fold_trials(self, policy: Policy, observations: Sequence[Observation], step: Step) -> None:
        """Update the state of a policy with the observations of its trial passes."""
        assert isinstance(policy, Stateful)
        number = self._numbers[id(policy)]
        with torch.no_grad():
            self._replace(number, policy.at(step).observe_trials(self._states[number], observations, step))

    def _replace(self, number: str, values: Values) -> None:
        policy, before = self._policies[number], self._states[number]
        after = _check(policy, values, before)
        if _layout(after) != _layout(before):
            raise UsageError(
                f"{type(policy).__name__}: observe must return the same entries, shapes and dtypes as the "
                f"state: {_layout(before)}, got {_layout(after)}"
            )
        self._states[number] = {key: _stay(before[key], value) for key, value in after.items()}

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the present states and observations."""
        states, observed = dict(self._states), _map(lambda value: value, self._observed)

        def restore() -> None:
            self._states, self._observed = states, observed

        return restore

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Restore states and observations after a probe."""
        restore = self.remember()
        try:
            yield
        finally:
            restore()

    def state_dict(self) -> dict[str, Any]:
        """Return one entry with all states and observations by name; empty if no policy has state."""
        if not self._policies:
            return {}
        own = {f"{n}/{key}": value for n, values in self._states.items() for key, value in values.items()}
        measured = {
            f"{_OBSERVED}/{number}/{measure}/{name}": value
            for number, observation in self._observed.items()
            for measure, values in observation.items()
            for name, value in values.items()
        }
        return {"policy_state": own | measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the entry. Raises :class:`UsageError` if it belongs to other policies, or to the middle of a step of
        a version that stored observations without a policy.
        """
        if not self._policies:
            return
        found = dict(state["policy_state"])
        observed: dict[str, Observation] = {}
        states: dict[str, dict[str, Tensor | float]] = {number: {} for number in self._policies}
        for key, value in found.items():  # a checkpoint's file has one flat name for each tensor
            first, rest = key.split("/", 1)
            if first == _OBSERVED:
                number, measure, name = _split(rest)
                observed.setdefault(number, Observation()).add(name, {measure: Measure(value)})
            else:
                states.setdefault(first, {})[rest] = value
        for number, policy in self._policies.items():
            mine, theirs = _layout(self._states[number]), _layout(states[number])
            if mine != theirs:
                raise UsageError(f"the loaded state does not fit {type(policy).__name__}: needs {mine}, got {theirs}")
        if states.keys() != self._states.keys():
            raise UsageError(
                f"the loaded state belongs to other policies: it has the policies {sorted(states)}, but the "
                f"engine has {sorted(self._states)}"
            )
        self._states = {number: dict(sorted(values.items())) for number, values in states.items()}
        self._observed = observed
        self._device = None  # unknown: the state may come from another device


@dataclass(frozen=True)
class _Trial:
    """The running trial pass."""

    number: str  # number of the policy that requested it
    step: Step
    observation: Observation = field(default_factory=Observation)


def _split(name: str) -> tuple[str, str, str]:
    """Return policy, measure and place from the name of a stored observation."""
    number, measure, *place = name.split("/", 2)
    if not number.isdigit() or not place:
        raise UsageError(
            "the state was saved between two micro-batches of a step by an older version of SparseBP, in a format "
            f"({number!r}) that this version cannot load: load a state from the end of a step, or use that version"
        )
    return number, measure, place[0]


def _map(change: Callable[[Tensor], Tensor], observed: Mapping[str, Observation]) -> dict[str, Observation]:
    """Return a copy of the observations with changed values."""
    found: dict[str, Observation] = {}
    for number, observation in observed.items():
        found[number] = Observation()
        for measure, values in observation.items():
            found[number][measure] = {name: change(value) for name, value in values.items()}
    return found


def _check_measures(policy: Policy, measures: Mapping[str, Measure]) -> None:
    for name, measure in measures.items():
        good = isinstance(name, str) and name and "/" not in name
        if not good or not isinstance(measure, Measure) or not isinstance(measure.value, Tensor):
            raise UsageError(
                f"{type(policy).__name__}: measure must return a dict of Measure(tensor) whose keys are names without "
                f"'/', got {name!r}: {measure!r}"
            )


def _check(policy: Stateful[Any], values: Values, before: Values = MappingProxyType({})) -> Values:
    """Check a state and return it with new entries copied, since a policy may return one tensor under two names, or a
    tensor that other code changes in place.
    """
    name = type(policy).__name__
    if not isinstance(values, Mapping):
        raise UsageError(f"{name}: a state must map names to tensors and numbers, got {type(values).__name__}")
    for key, value in values.items():
        is_plain = type(value) in (Tensor, int, float) or hasattr(value, "fake_mode")  # a forecast uses fake tensors
        if not isinstance(key, str) or not is_plain:
            raise UsageError(f"{name}: a state must map names to tensors and numbers, got {key!r}: {value!r}")
    return {
        key: value.detach().clone() if isinstance(value, Tensor) and value is not before.get(key) else value
        for key, value in sorted(values.items())
    }


def _stay(before: Tensor | float, after: Tensor | float) -> Tensor | float:
    """Return an entry after a step. In a forecast with fake tensors keep the previous integers: they determine how much
    is chosen, and so the cost of a step."""
    if isinstance(after, Tensor) and hasattr(after, "fake_mode") and not after.is_floating_point():
        return before
    return after


def _layout(values: Values) -> dict[str, str]:
    """Return dtype and shape, or type, of each entry of a state, without reading values."""
    return {
        key: f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        for key, value in sorted(values.items())
    }


def _to(values: Values, device: torch.device) -> Values:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in values.items()}
