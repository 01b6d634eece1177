"""The states of policies: the engine keeps them, and folds in what each step saw."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Observation, Observed, Policy, Seen, Site, Stateful, Step, TrialPass, choice

Values = Mapping[str, Tensor | float]
_OBSERVED = "observed"
_OF_PARAMETERS: dict[Observed, Callable[[Tensor], Tensor]] = {
    "parameter_norm": lambda gradient: choice.norm(gradient.reshape(1, -1), 1)[0],
    "parameter_l1": choice.l1_norm,
}
_AT_SITES: frozenset[Observed] = frozenset({"grad_norm", "column_norm"})
_IN_TRIALS: frozenset[Observed] = frozenset(
    {"gradient_sample", "row_product", "example_norm", "weight_gradient", "reader_gradient", "input_entries"}
)
SAMPLED = 100  # one in so many entries of a gradient is sampled


@final
class PolicyStates:
    """The states of those policies of an engine that have one, each by its number among all policies.

    ``policies`` is every policy with the places where it decides, ``gradients`` what the optimizer gets of trained
    parameters, by name. Raises :class:`UsageError` if ``init`` returns anything but tensors and numbers.
    """

    def __init__(
        self,
        policies: Sequence[tuple[Policy, Sequence[Any]]] = (),
        gradients: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self._policies = {str(n): policy for n, (policy, _) in enumerate(policies) if isinstance(policy, Stateful)}
        self._numbers = {id(policy): number for number, policy in self._policies.items()}
        self._states = {n: _check(policy, policy.init(policies[int(n)][1])) for n, policy in self._policies.items()}
        self._observed: dict[str, Tensor] = {}  # norms of the step under way, by part and site
        self._gradients = gradients
        self._trial_step: Step | None = None  # during a trial pass
        self._tried: dict[str, Tensor] = {}  # what the trial pass under way saw
        self._device: torch.device | None = None

    def of(self, policy: Policy) -> Values:
        """Return the state of a policy; empty if it has none."""
        number = self._numbers.get(id(policy))
        return {} if number is None else self._states[number]

    def show(self, policy: Policy, step: Step) -> Step:
        """Return the step with the policy's state, as its decision reads it."""
        return replace(step, state=self.of(policy))

    def move(self, device: torch.device) -> None:
        """Move all states to the model's device, if they are on another."""
        if device != self._device:
            self._states = {number: _to(values, device) for number, values in self._states.items()}
            self._observed = {name: norm.to(device) for name, norm in self._observed.items()}
            self._device = device

    def see(self, policy: Policy, site: Site, seen: Seen) -> None:
        """Add a gradient to the norms of its site, as far as the site's policy observes them."""
        if not isinstance(policy, Stateful):
            return
        grad_NO = seen.grad_NO
        if self._trial_step is not None and "row_product" in policy.observes:
            self._tried[f"row_product/{site.name}"] = choice.norm(grad_NO, 1) * seen.input_norm
        if policy.has_trials or not policy.observes & _AT_SITES:
            return
        norm_O = choice.norm(grad_NO, 0)
        parts: dict[Observed, Tensor] = {"column_norm": norm_O}
        if "grad_norm" in policy.observes:
            parts["grad_norm"] = choice.norm(norm_O[None], 1)[0]
        for part in policy.observes & _AT_SITES:
            name, before = f"{part}/{site.name}", self._observed.get(f"{part}/{site.name}")
            self._observed[name] = parts[part] if before is None else torch.hypot(before, parts[part])

    def see_input(self, policy: Policy, site: Site, step: Step, x_ND: Tensor) -> None:
        """Note the mean row of a linear's input in the first forward of a step; one that is computed again has the
        same.
        """
        if self.watches(policy, "input_mean") and not (step.draw or step.micro_batch or step.call):
            dtype = torch.promote_types(x_ND.dtype, torch.float32)
            self._observed[f"input_mean/{site.name}"] = x_ND.mean(0, dtype=dtype)

    def see_block(self, policy: Policy, name: str, gradient: Tensor) -> None:
        """Add the gradient of what a residual block adds to the stream to the norm of the step."""
        key, norm = f"block_norm/{name}", choice.norm(gradient.detach().reshape(1, -1), 1)[0]
        if self.watches(policy, "block_norm"):
            self._observed[key] = torch.hypot(self._observed[key], norm) if key in self._observed else norm

    def see_scores(
        self,
        policy: Policy,
        part: Literal["example_loss", "example_gradient", "example_row", "token_loss"],
        score: Tensor,
    ) -> None:
        """Note the losses, norms or rows that a policy has read before a forward of the step."""
        if self.watches(policy, part):
            number = sum(key.startswith(f"{part}/") for key in self._observed)
            self._observed[f"{part}/{number}"] = score.detach()

    def watches(self, policy: Policy, part: Observed) -> bool:
        """Whether a policy observes a part of each step."""
        return isinstance(policy, Stateful) and not policy.has_trials and part in policy.observes

    def see_layer(self, policy: Policy, layer: int, norm_B: Tensor) -> None:
        """Note the norms of the examples' gradients at a layer's output, in a trial pass."""
        if self._trial_step is not None and isinstance(policy, Stateful) and "example_norm" in policy.observes:
            self._tried[f"example_norm/{layer}"] = norm_B

    def see_weight(self, policy: Policy, name: str, gradient_OD: Tensor) -> None:
        """Note the gradient of a linear's weight, in a trial pass."""
        if self._trial_step is not None and isinstance(policy, Stateful) and "weight_gradient" in policy.observes:
            self._tried[f"weight_gradient/{name}"] = gradient_OD

    def see_readers(self, policy: Policy, name: str, num_entries: int, gradients: Mapping[str, Tensor]) -> None:
        """Note the gradients of the weights of all linears that read an input, in a trial pass, and the input's size;
        ``name`` is the linear that reads it first.
        """
        observes = policy.observes if isinstance(policy, Stateful) else frozenset()
        if self._trial_step is not None and "reader_gradient" in observes and gradients:
            samples = [_sample(gradient, reader, self._trial_step) for reader, gradient in gradients.items()]
            self._tried[f"reader_gradient/{name}"] = torch.cat(samples)
            self._tried[f"input_entries/{name}"] = torch.tensor(float(num_entries), dtype=torch.float64)

    @contextmanager
    def trying(self, policy: Policy, step: Step, state: Values | None) -> Iterator[None]:
        """Give a policy another state for a trial pass, and observe what it sees in it."""
        number = self._numbers[id(policy)]
        before = self._states[number]
        assert isinstance(policy, Stateful)
        self._trial_step, self._tried = step, {}
        self._states[number] = before if state is None else _check(policy, state)
        try:
            yield
        finally:
            self._states[number], self._trial_step = before, None

    def end_step(self, step: Step) -> None:
        """Fold what the step saw into the states."""
        if not self._policies:
            return
        parts: dict[str, dict[str, Tensor]] = {}
        for key, norm in self._observed.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = norm
        self._observed = {}
        with torch.no_grad():
            observing = [policy for policy in self._policies.values() if not policy.has_trials]
            seen = self._measure_parameters({part for policy in observing for part in policy.observes})
            observation = Observation(**parts, **seen)
            for number, policy in self._policies.items():
                self._replace(number, policy.at(step).observe(self._states[number], observation, step))

    def wanted(self, policy: Policy, step: Step) -> Sequence[Collection[str] | TrialPass]:
        """Return the trial passes that a policy wants before a step."""
        return policy.wants_trials(self.show(policy, step)) if isinstance(policy, Stateful) else ()

    @torch.no_grad()
    def measure(self, policy: Policy) -> Observation:
        """Return what a policy observes of the parameters, as of now, and what it has seen in the trial pass."""
        observes = policy.observes if isinstance(policy, Stateful) else frozenset()
        parts = {part: dict[str, Tensor]() for part in observes & _IN_TRIALS}
        for key, value in self._tried.items():
            part, _, name = key.partition("/")
            parts[part][name] = value  # type: ignore[index]  # keys are of see and see_layer
        if "gradient_sample" in observes:
            assert self._trial_step is not None
            parts["gradient_sample"] = {
                name: _sample(gradient, name, self._trial_step) for name, gradient in self._gradients().items()
            }
        return Observation(**self._measure_parameters(set(observes)), **parts)

    def fold_trials(self, policy: Policy, observations: Sequence[Observation], step: Step) -> None:
        """Fold what trial passes saw into the state of the policy that wanted them."""
        assert isinstance(policy, Stateful)
        number = self._numbers[id(policy)]
        with torch.no_grad():
            self._replace(number, policy.observe_trials(self._states[number], observations, step))

    def _replace(self, number: str, values: Values) -> None:
        policy, before = self._policies[number], self._states[number]
        after = _check(policy, values)
        if _layout(after) != _layout(before):
            raise UsageError(
                f"{type(policy).__name__}: observe must return the entries of the state, with their shapes and "
                f"dtypes: {_layout(before)}, got {_layout(after)}"
            )
        self._states[number] = after

    def _measure_parameters(self, parts: Collection[Observed]) -> dict[str, dict[str, Tensor]]:
        return {
            part: {name: measure(gradient) for name, gradient in self._gradients().items()}
            for part, measure in _OF_PARAMETERS.items()
            if part in parts
        }

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Restore states and observations after a probe."""
        before = self._states, self._observed
        self._states, self._observed = dict(self._states), dict(self._observed)
        try:
            yield
        finally:
            self._states, self._observed = before

    def state_dict(self) -> dict[str, Any]:
        """Return one entry with everything by name; nothing if no policy has state."""
        if not self._policies:
            return {}
        own = {f"{n}/{key}": value for n, values in self._states.items() for key, value in values.items()}
        return {"policy_state": own | {f"{_OBSERVED}/{key}": norm for key, norm in self._observed.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the entry. Raises :class:`UsageError` if it is of other policies."""
        if not self._policies:
            return
        found = dict(state["policy_state"])
        observed = {key: found.pop(key) for key in list(found) if key.startswith(f"{_OBSERVED}/")}
        states: dict[str, dict[str, Tensor | float]] = {number: {} for number in self._policies}
        for key, value in found.items():
            number, _, name = key.partition("/")
            states.setdefault(number, {})[name] = value
        for number, policy in self._policies.items():
            mine, theirs = _layout(self._states[number]), _layout(states[number])
            if mine != theirs:
                raise UsageError(f"not a state of {type(policy).__name__}: it has {mine}, got {theirs}")
        if states.keys() != self._states.keys():
            raise UsageError(f"not a state of these policies: {sorted(states)}, got {sorted(self._states)}")
        self._states = {number: dict(sorted(values.items())) for number, values in states.items()}
        self._observed = {key.removeprefix(f"{_OBSERVED}/"): norm for key, norm in observed.items()}
        self._device = None  # wherever the state was saved


def _sample(gradient: Tensor, name: str, step: Step) -> Tensor:
    """Return some entries of a gradient, the same at every call with one step."""
    number = gradient.numel()
    num_drawn = -(-number // SAMPLED)
    generator = step.generator(_Drawn(f"sample of {name}"))
    index_K = torch.randint(number, (num_drawn,), generator=generator).to(gradient.device)
    return gradient.reshape(-1)[index_K].float() * float((number / num_drawn) ** 0.5)


@dataclass(frozen=True)
class _Drawn:
    name: str


def _check(policy: Stateful[Any], values: Values) -> Values:
    name = type(policy).__name__
    if not isinstance(values, Mapping):
        raise UsageError(f"{name}: a state is a mapping of tensors and numbers, got {type(values).__name__}")
    for key, value in values.items():
        if not isinstance(key, str) or type(value) not in (Tensor, int, float):
            raise UsageError(f"{name}: a state is a mapping of tensors and numbers, got {key!r}: {value!r}")
    return {key: value.detach() if isinstance(value, Tensor) else value for key, value in sorted(values.items())}


def _layout(values: Values) -> dict[str, str]:
    """Describe the entries of a state, without reading them."""
    return {
        key: f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        for key, value in sorted(values.items())
    }


def _to(values: Values, device: torch.device) -> Values:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in values.items()}
