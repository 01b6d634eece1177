"""Check that a depth selector keeps its contract; each violation raises an ``AssertionError`` of one sentence."""

import torch

from sparsebp_cli.policy import Step
from sparsebp_depth.kind import DepthSelector

NUM_STEPS = 400


def check_depth_selector(policy: DepthSelector) -> None:
    """Check a depth selector with models of one to twelve layers."""
    name = type(policy).__name__
    for num_layers in (1, 2, 5, 12):
        before = torch.get_rng_state()
        found = [policy.at(step).depth(num_layers, step) for step in _steps()]
        again = [policy.at(step).depth(num_layers, step) for step in _steps()]
        assert torch.equal(before, torch.get_rng_state()), f"{name}: uses a global random generator: use step.generator"
        assert found == again, f"{name}: chooses differently when called again at the same step"
        assert all(1 <= depth <= num_layers for depth in found), f"{name}: depth must be from 1 to {num_layers}"
        if policy.exact:
            assert set(found) == {num_layers}, f"{name}: declares exact, but skips the backward of some layers"


def _steps() -> list[Step]:
    return [Step(index, num_steps=NUM_STEPS) for index in range(NUM_STEPS)]
