"""GREATS in whole runs: a killed one resumes identically, its validation examples stay apart, and its cost is told."""

from __future__ import annotations

import pytest

from sparsebp_cli.run import History
from tests.chaos.kill import resume_killed
from tests.worker.conftest import LLAMA, work

GREATS = {"name": "greats", "keep": 0.5, "validation_batch_size": 3}
PART = {"policy_validation_examples": 9}


@pytest.mark.slow
def test_a_killed_run_that_compares_gradients_resumes_identically(tiny_recipe, prepared) -> None:
    recipe = tiny_recipe(
        model={"config": LLAMA | {"attention_dropout": 0.1}},
        dataset=PART,
        policy=[GREATS],
        training={"max_steps": 20, "gradient_accumulation_steps": 2},
        checkpoint={"every": 3},
        measure={"probe_every": 7, "fidelity_every": None},
    )
    straight = resume_killed(recipe, prepared)
    history = History.load(straight.path)
    assert set(history.series("proof/excess_share").values()) == {0.0}
    assert all(value > 0.0 for value in history.series("flops/scoring").values())


def test_a_control_trains_on_the_same_examples_and_says_who_reads_the_others(tiny_recipe, prepared) -> None:
    uniform = {"name": "uniform", "start": 0.0, "end": 1.0, "interrupt": 0, "keep": 0.5}
    histories = []
    for policy in (GREATS, uniform):
        run = prepared(tiny_recipe(dataset=PART, policy=[policy], training={"max_steps": 3}))
        assert work(run) == 0, (run.path / "worker.log").read_text()
        histories.append(History.load(run.path))
    for name in ("dataset_digest", "train_examples", "policy_validation_examples"):
        assert histories[0].facts[name] == histories[1].facts[name]
    assert histories[0].facts["policy_validation_examples"] == 9
    text = "dataset.policy_validation_examples: 9 training examples are set aside, but no policy of this run reads them"
    told = [any(note == text for _, _, note in history.notes) for history in histories]
    assert told == [False, True]
    assert histories[0].series("train/loss") != histories[1].series("train/loss")
