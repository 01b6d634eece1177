"""kill -9 at random moments in every way of training: weights, optimizer, generators and metrics stay those of a run
that was left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import State
from sparsebp_cli.worker.model import build_model, build_tokenizer
from tests import tier
from tests.chaos.kill import difference, kill_at_random, outcome
from tests.chaos.way import WAYS
from tests.worker.conftest import LLAMA, work

KILLS_A_WAY = 23  # at least, over runs that are killed up to eight times; all ways together: 1,500
MEASURED = {"eval_every": 11, "probe_every": 17, "fidelity_every": 19}
DROPOUT = {"attention_dropout": 0.1}


@pytest.fixture
def reference(tiny_folder: Path, tiny_recipe: Callable[..., Recipe]) -> str:
    """The folder of a model that a policy can compare with."""
    section = tiny_recipe().model
    torch.manual_seed(11)
    build_model(section, build_tokenizer(section), None).save_pretrained(tiny_folder / "reference")
    return str(tiny_folder / "reference")


def sections(way: str, reference: str = "") -> dict[str, Any]:
    """Return the recipe's sections of one way: 40 steps, a checkpoint every two, all measurements under way."""
    given = dict(WAYS[way])
    if "policy" in given:
        given["policy"] = [one | ({"reference": reference} if "reference" in one else {}) for one in given["policy"]]
    model = {"config": LLAMA | DROPOUT} | given.pop("model", {})
    training = {"max_steps": 40} | given.pop("training", {})
    return given | {"model": model, "training": training, "checkpoint": {"every": 2}, "measure": MEASURED}


@pytest.mark.chaos
@pytest.mark.promise("R1", "R16")
@pytest.mark.timeout(3000)  # of a busy machine, too
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_run_of_any_policy_ends_as_if_left_alone(
    way, tiny_recipe, prepared, reference, record_property
) -> None:
    recipe = tiny_recipe(**sections(way, reference))
    straight = prepared(recipe)
    assert work(straight) == 0
    expected, chance, kills, inside, different = outcome(straight), random.Random(way), 0, 0, []
    while kills < KILLS_A_WAY:
        run = prepared(recipe)
        for _ in range(chance.choice([1, 4, 8])):
            died_saving = kill_at_random(run, chance)
            kills += died_saving is not None
            inside += died_saving is True
        assert work(run) == 0
        assert run.state() is State.FINISHED
        different += difference(expected, outcome(run))
    record_property("trials", kills)
    record_property("of which", ("inside a save", inside))
    assert not different


@pytest.mark.promise("R1", "R16")
@pytest.mark.slow
def test_a_killed_run_of_policies_that_the_commit_draws_ends_as_if_left_alone(
    tiny_recipe, prepared, reference, pytestconfig, record_property
) -> None:
    commit, kills = tier.find_commit(pytestconfig.rootpath), 0
    for way in tier.draw(WAYS, 2, commit):
        given = sections(way, reference) | {"measure": {"eval_every": 5, "probe_every": 6}}
        recipe, chance = tiny_recipe(**given | {"training": given["training"] | {"max_steps": 12}}), random.Random(way)
        straight, killed = prepared(recipe), prepared(recipe)
        assert work(straight) == 0, straight.log_file.read_text()
        kills += sum(kill_at_random(killed, chance, longest=6) is not None for _ in range(2))
        assert work(killed) == 0, killed.log_file.read_text()
        # As in test_every_way.py: the step whose peak memory is measured may be the first of its process.
        found = [name for name in difference(outcome(straight), outcome(killed)) if "memory/step_peak_" not in name]
        assert not found, (way, found)
    record_property("trials", kills)
    assert kills
