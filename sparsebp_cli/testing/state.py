"""Conformance suite of the state of policies. Each broken promise is an ``AssertionError`` of one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.policy import Observation, Observed, Policy, Site, Stateful, Step, TrainedWeight
from sparsebp_cli.policy.contract import Named
from sparsebp_cli.testing.promise import name_of, random_states, require

Values = Mapping[str, Tensor | float]
NUM_STEPS = 3
LONGEST = 1000  # steps within which trial passes are looked for
NUM_ROWS = 6


def first_state(policy: Policy, places: Sequence[object] = ()) -> Values:
    """Return the state before the first step; empty without one."""
    return policy.init(places) if isinstance(policy, Stateful) else {}


def check_state(policy: Policy, places: Sequence[Named | int]) -> None:
    """Check that ``init`` and ``observe`` are pure, and that entries keep their names, shapes and dtypes."""
    if not isinstance(policy, Stateful):
        return
    name, first = name_of(policy), policy.init(places)
    require(_same(first, policy.init(places)), f"{name}: init returns another state when called again")
    state, observation = first, _observe(policy, places)
    for step, observed in enumerate((observation, observation, Observation())):
        before, states = _copy(state), random_states()
        after = policy.observe(state, observed, Step(step, num_steps=NUM_STEPS))
        require(states == random_states(), f"{name}: observe uses a global random generator")
        require(_same(state, before), f"{name}: observe changes the state that it receives")
        again = policy.observe(state, observed, Step(step, num_steps=NUM_STEPS))
        require(_same(after, again), f"{name}: observe returns another state when called again")
        require(_layout(after) == _layout(first), f"{name}: observe returns other entries than init")
        state = after
    _check_trials(policy, places, first)


def _check_trials(policy: Policy, places: Sequence[Named | int], first: Values) -> None:
    """Check the same of ``observe_trials``, at the first step that wants trial passes."""
    assert isinstance(policy, Stateful)
    name, steps = name_of(policy), (Step(index, num_steps=LONGEST, state=first) for index in range(LONGEST))
    step = next((step for step in steps if policy.wants_trials(step)), None)
    if step is None:
        return
    observations = [_observe(policy, places, seed) for seed, _ in enumerate(policy.wants_trials(step))]
    before, states = _copy(first), random_states()
    after = policy.observe_trials(first, observations, step)
    require(states == random_states(), f"{name}: observe_trials uses a global random generator")
    require(_same(first, before), f"{name}: observe_trials changes the state that it receives")
    again = policy.observe_trials(first, observations, step)
    require(_same(after, again), f"{name}: observe_trials returns another state when called again")
    require(_layout(after) == _layout(first), f"{name}: observe_trials returns other entries than init")


def _observe(policy: Stateful[Any], places: Sequence[Named | int], seed: int = 0) -> Observation:
    generator = torch.Generator().manual_seed(seed)
    columns = {p.name: torch.rand(p.num_features, generator=generator) for p in places if isinstance(p, Site)}
    sizes = {p.name: torch.rand((), generator=generator) for p in places if not isinstance(p, Site | int)}
    rows = {name: torch.rand(NUM_ROWS, generator=generator) for name in columns}
    layers = {str(p.layer): torch.rand(NUM_ROWS, generator=generator) for p in places if isinstance(p, Site)}
    parts: dict[Observed, dict[str, Tensor]] = {
        "column_norm": columns,
        "grad_norm": {name: norm_O.norm() for name, norm_O in columns.items()},
        "parameter_l1": sizes,
        "parameter_norm": sizes,
        "gradient_sample": {f"{name}.weight": row_N for name, row_N in rows.items()},
        "row_product": rows,
        "example_norm": layers,
        "weight_gradient": {
            p.name: torch.rand(p.matrix_OD.shape, generator=generator) for p in places if isinstance(p, TrainedWeight)
        },
        "reader_gradient": rows,
        "input_entries": {name: torch.tensor(float(NUM_ROWS)) for name in rows},
        "input_mean": rows,
        "block_norm": sizes,
        "example_loss": {"0": torch.rand(NUM_ROWS, generator=generator)},
        "example_gradient": {"0": torch.rand(NUM_ROWS, generator=generator)},
        "example_row": {"0": torch.randperm(NUM_ROWS, generator=generator)},
        "token_loss": {"0": torch.rand(2, NUM_ROWS, generator=generator)},
    }
    return Observation(**{part: parts[part] for part in policy.observes})


def _copy(state: Values) -> Values:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _same(one: Values, other: Values) -> bool:
    pairs = ((value, other[key]) for key, value in one.items() if key in other)
    return one.keys() == other.keys() and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs
    )


def _layout(state: Values) -> dict[str, object]:
    return {k: (v.dtype, v.shape) if isinstance(v, Tensor) else type(v) for k, v in state.items()}
