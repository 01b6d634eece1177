"""kill -9 at random moments in every way of training: weights, optimizer, generators and metrics stay those of a run
that was left alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sparsebp_cli.policy.discovery import find_policies
from sparsebp_cli.run import State
from tests.chaos.kill import difference, kill_at_random, outcome
from tests.chaos.way import WAYS
from tests.worker.conftest import LLAMA, work

RUNS_A_WAY = 12
MEASURED = {"eval_every": 11, "probe_every": 17, "fidelity_every": 19}
DROPOUT = {"attention_dropout": 0.1}


def sections(way: str) -> dict[str, Any]:
    """Return the recipe's sections of one way: 40 steps, a checkpoint every two, all measurements under way."""
    given = dict(WAYS[way])
    model = {"config": LLAMA | DROPOUT} | given.pop("model", {})
    training = {"max_steps": 40} | given.pop("training", {})
    return given | {"model": model, "training": training, "checkpoint": {"every": 2}, "measure": MEASURED}


@pytest.mark.chaos
@pytest.mark.promise("R1", "R16")
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_run_of_any_policy_ends_as_if_left_alone(way, tiny_recipe, prepared, record_property) -> None:
    recipe = tiny_recipe(**sections(way))
    straight = prepared(recipe)
    assert work(straight) == 0
    expected, chance, kills, inside, different = outcome(straight), random.Random(way), 0, 0, []
    for _ in range(RUNS_A_WAY):
        run = prepared(recipe)
        for _ in range(chance.choice([1, 3, 6])):
            died_saving = kill_at_random(run, chance)
            kills += died_saving is not None
            inside += died_saving is True
        assert work(run) == 0
        assert run.state() is State.FINISHED
        different += difference(expected, outcome(run))
    record_property("trials", kills)
    record_property("of which", ("inside a save", inside))
    assert not different


def test_every_registered_policy_is_killed() -> None:
    named = {entry["name"] for given in WAYS.values() for entry in given.get("policy", ())}
    assert set(find_policies()) <= named
