"""Blocks left out of the forward in whole runs: killed and resumed, and measured."""

from __future__ import annotations

from sparsebp_cli.run import History, metric
from tests.chaos.kill import resume_killed
from tests.worker.conftest import LLAMA

DROPPING = LLAMA | {"num_hidden_layers": 3, "attention_dropout": 0.1}


def test_a_killed_run_resumes_identically_and_its_forward_is_shorter(tiny_recipe, prepared) -> None:
    recipe = tiny_recipe(
        model={"config": DROPPING},
        policy=[{"name": "layerdrop", "keep": 0.6}],
        training={"max_steps": 24, "gradient_accumulation_steps": 2},
        checkpoint={"every": 3},
        measure={"probe_every": 4},
        backward={"checkpointing": "full"},
    )
    straight = resume_killed(recipe, prepared)
    history = History.load(straight.path)
    forward = history.series(metric.FORWARD_FLOPS.name).values()
    assert len(set(forward)) > 1  # another number of blocks at another step
    assert set(history.series(metric.EXCESS_SHARE.name).values()) == {0.0}
    assert max(history.series(metric.LIMIT.name).values()) > 1.3
