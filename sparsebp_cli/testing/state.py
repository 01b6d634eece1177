"""Conformance suite of the state of policies. Each broken promise is an ``AssertionError`` of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeAlias, get_args

import torch
from safetensors.torch import load, save
from torch import Tensor

from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.policy import (
    LayerGradient,
    Observation,
    Observed,
    ParameterGradient,
    Policy,
    Reading,
    ReadTokens,
    Score,
    Seen,
    Site,
    SiteGradient,
    Stateful,
    Step,
    Tokens,
)
from sparsebp_cli.policy.contract import Named
from sparsebp_cli.testing.promise import name_of, random_states, require
from sparsebp_cli.testing.suite import same

Values = Mapping[str, Tensor | float]
Show: TypeAlias = Callable[[int], Sequence[Observed]]
NUM_STEPS = 3
LONGEST = 1000  # steps in which the suite searches for trial passes
NUM_ROWS = 6


def first_state(policy: Policy, places: Sequence[object] = ()) -> Values:
    """Return the state before the first step; empty for a policy without state."""
    return policy.init(places) if isinstance(policy, Stateful) else {}


def check_state(policy: Policy, places: Sequence[Any], show: Show | None = None) -> None:
    """Check that ``init``, ``measure`` and ``observe`` are pure, and that entries of the state keep their names, shapes
    and dtypes; a broken promise is an ``AssertionError``.

    Args:
        policy: A policy of any kind. The function checks nothing if it has no state.
        places: Places where the policy decides, as arguments for ``init``.
        show: Returns the objects that policies of its kind observe in a step, with random values from a seed, as new
            tensors at each call. None: the objects of the built-in kinds at such places.
    """
    if not isinstance(policy, Stateful):
        return
    show = partial(_show, places) if show is None else show
    name, first = name_of(policy), policy.init(places)
    require(same(first, policy.init(places)), f"{name}: init returns a different state when called again")
    state, observation = first, _observe(policy, show)
    for step, observed in enumerate((observation, observation, Observation())):
        before, states = deepcopy(state), random_states()
        after = policy.observe(state, observed, Step(step, num_steps=NUM_STEPS))
        require(states == random_states(), f"{name}: observe uses a global random generator")
        require(same(state, before), f"{name}: observe changes the state that it receives")
        again = policy.observe(state, observed, Step(step, num_steps=NUM_STEPS))
        require(same(after, again), f"{name}: observe returns a different state when called again")
        require(_layout(after) == _layout(first), f"{name}: observe returns different entries than init")
        state = after
    _check_trials(policy, show, first)
    _check_saved(policy, places, show)


def _check_saved(policy: Policy, places: Sequence[Any], show: Show) -> None:
    """Check that a checkpoint can store the policy's state after every step, and that it can be read again."""
    assert isinstance(policy, Stateful)
    states, observed = PolicyStates([(policy, places)]), dict[str, Tensor]()
    if not policy.has_trials:
        observation = _observe(policy, show)
        observed = {
            f"observed/0/{measure}/{name}": value
            for measure, values in observation.items()
            for name, value in values.items()
        }
    for index in range(NUM_STEPS):
        states.load_state_dict({"policy_state": states.state_dict()["policy_state"] | observed})
        states.end_step(Step(index, num_steps=NUM_STEPS))
        kept = {key: value for key, value in states.state_dict()["policy_state"].items() if isinstance(value, Tensor)}
        stored = load(save(kept))  # save refuses tensors that share memory
        require(same(kept, stored), f"{name_of(policy)}: saving and loading the state of step {index} changes it")


def _check_trials(policy: Policy, show: Show, first: Values) -> None:
    """Check that ``observe_trials`` is pure and keeps the layout of the state, at the first step with trial passes."""
    assert isinstance(policy, Stateful)
    name, steps = name_of(policy), (Step(index, num_steps=LONGEST, state=first) for index in range(LONGEST))
    step = next((step for step in steps if policy.wants_trials(step)), None)
    if step is None:
        return
    observations = [_observe(policy, show, seed) for seed, _ in enumerate(policy.wants_trials(step))]
    before, states = deepcopy(first), random_states()
    after = policy.observe_trials(first, observations, step)
    require(states == random_states(), f"{name}: observe_trials uses a global random generator")
    require(same(first, before), f"{name}: observe_trials changes the state that it receives")
    again = policy.observe_trials(first, observations, step)
    require(same(after, again), f"{name}: observe_trials returns a different state when called again")
    require(_layout(after) == _layout(first), f"{name}: observe_trials returns different entries than init")


def _observe(policy: Policy, show: Show, seed: int = 0) -> Observation:
    """Return the policy's measures of a step with random values; check that ``measure`` is pure."""
    assert isinstance(policy, Stateful)
    name, step, shown = name_of(policy), Step(0, seed=seed, num_steps=NUM_STEPS), show(seed)
    unknown = sorted(observed.__name__ for observed in policy.observes - {type(seen) for seen in shown})
    require(not unknown, f"{name}: observes {', '.join(unknown)}, which policies of its kind do not receive")
    states, found = random_states(), policy.look(shown, step)
    require(states == random_states(), f"{name}: measure uses a global random generator")
    for again, text in ((shown, "when called again"), (show(seed), "because it changes its input")):
        seen = policy.look(again, step)
        require(same(seen, found), f"{name}: measure returns different values {text}")
    for observed in policy.observes:
        mine = [seen for seen in shown if type(seen) is observed]
        require(bool(policy.look(mine, step)), f"{name}: observes {observed.__name__}, but measure returns nothing")
    return found


def _show(places: Sequence[Named], seed: int) -> list[Observed]:
    """Return the objects that policies of the built-in kinds observe at these places, with random values."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    sites = [place for place in places if isinstance(place, Site)]
    others = [place for place in places if not isinstance(place, Site)]
    target_BT = torch.ones(2, NUM_ROWS, dtype=torch.bool)
    scores: dict[Score, Tensor] = {score: draw(2, NUM_ROWS) for score in get_args(Score)}
    readings: dict[Reading, Tensor] = {"input_norm": draw(NUM_ROWS)}
    shown: list[Observed] = [ReadTokens("0", Tokens(None, target_BT, target_BT, scores))]
    for site in sites:
        size = site.num_features
        own = readings | {"input": draw(NUM_ROWS, size), "weight_norm": draw(size)}
        shown += [
            SiteGradient(site.name, Seen(draw(NUM_ROWS, size), readings=own)),
            ParameterGradient(f"{site.name}.weight", draw(size, size)),
        ]
    shown += [LayerGradient(str(layer), draw(NUM_ROWS)) for layer in sorted({str(site.layer) for site in sites})]
    return [*shown, *(ParameterGradient(place.name, draw(NUM_ROWS)) for place in others)]


def _layout(state: Values) -> dict[str, object]:
    return {k: (v.dtype, v.shape) if isinstance(v, Tensor) else type(v) for k, v in state.items()}
