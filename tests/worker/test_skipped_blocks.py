"""Blocks left out of the forward in whole runs: killed and resumed, and measured."""

from __future__ import annotations

from typing import Any

import pytest

from sparsebp_cli.run import History, metric
from tests.chaos.kill import resume_killed
from tests.worker.conftest import LLAMA

DROPPING = LLAMA | {"num_hidden_layers": 3, "attention_dropout": 0.1}


@pytest.mark.always("policy0")
@pytest.mark.parametrize("policy", [{"name": "layerdrop", "keep": 0.6}, {"name": "pld", "theta": 0.2, "gamma": 0.2}])
def test_a_killed_run_resumes_identically_and_its_forward_is_shorter(policy: Any, tiny_recipe, prepared) -> None:
    recipe = tiny_recipe(
        model={"config": DROPPING},
        policy=[policy],
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
