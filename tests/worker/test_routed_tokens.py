"""Routed positions in whole runs: killed and resumed, and measured."""

from __future__ import annotations

import pytest

from sparsebp_cli.run import History, metric
from tests.chaos.kill import resume_killed
from tests.worker.conftest import LLAMA

FOUR = LLAMA | {"num_hidden_layers": 4}
POLICY = {"name": "random-ltd", "min_tokens": 5, "increase_step": 1, "over": 0.8}


@pytest.mark.slow
def test_a_killed_run_resumes_identically_and_does_what_it_claims(tiny_recipe, prepared) -> None:
    recipe = tiny_recipe(
        model={"config": FOUR | {"attention_dropout": 0.1}},
        policy=[POLICY, {"name": "frozen", "freeze": ["*.layers.0.*"]}],
        training={"max_steps": 12, "gradient_accumulation_steps": 2, "max_grad_norm": None},
        checkpoint={"every": 3},
        measure={"probe_every": 4, "warmup_steps": 0},
        backward={"checkpointing": "full"},
    )
    straight = resume_killed(recipe, prepared)
    history = History.load(straight.path)
    forward = list(history.series(metric.FORWARD_FLOPS.name).values())
    assert forward == sorted(forward)
    assert forward[0] < forward[-1]
    assert set(history.series(metric.EXCESS_SHARE.name).values()) == {0.0}
