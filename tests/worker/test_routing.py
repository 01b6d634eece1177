"""A router in a whole run: what is logged, what is not claimed, and that the run resumes."""

from __future__ import annotations

from typing import Any

import pytest

from sparsebp_cli.run import History
from tests.chaos.kill import resume_killed
from tests.worker.conftest import work

RANDOM_TIES = {"name": "max-child", "leaves": "always", "ties": "random", "lookahead": True}
NODES = {"backward": {"sites": "nodes"}}


def _policy(**options: Any) -> dict[str, Any]:
    return {"policy": [{"name": "max-child"} | options]}


def _last(history: History, name: str) -> float:
    return list(history.series(name).values())[-1]


def test_a_run_tells_how_far_the_gradient_came_and_claims_nothing(tiny_recipe, prepared) -> None:
    run = prepared(tiny_recipe(**NODES, **_policy(lookahead=True), measure={"probe_every": 5}))
    assert work(run) == 0
    history = History.load(run.path)
    last = {name: _last(history, name) for name in history.metrics}
    assert last["policy/nodes"] > 150
    assert last["policy/nodes_run"] < 20
    assert last["policy/parameters_reached"] == 1
    assert 0.0 <= last["policy/miss_rate"] <= 1.0
    assert len(history.series("policy/nodes_run")) == 10
    assert last["flops/backward_executed"] > last["flops/backward_dense"]  # the full pass of lookahead is counted
    assert "speed/speedup" in last
    assert not {"speed/ceiling", "speed/realised_share", "proof/claimed_share", "policy/kept_share"} & last.keys()
    assert last["train/grad_norm"] > 0


def test_without_lookahead_only_what_was_reached_is_multiplied(tiny_recipe, prepared) -> None:
    run = prepared(tiny_recipe(**NODES, **_policy(), measure={"probe_every": 5}))
    assert work(run) == 0
    history = History.load(run.path)
    executed, dense = (_last(history, f"flops/backward_{way}") for way in ("executed", "dense"))
    assert executed < 0.4 * dense  # the head's two products, one of which loses
    assert "policy/miss_rate" not in history.metrics


@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}},
        {"backward": {"sites": "nodes", "checkpointing": "full"}},
        {"backward": {"sites": "nodes", "execution": "reference"}},
        {"model": {"lora": {"r": 4}}},
        {"policy": [RANDOM_TIES | {"missing": "zero"}]},
    ],
    ids=["accumulation and autocast", "checkpointing", "reference", "lora", "zero"],
)
def test_every_way_of_training_works_with_a_router(tiny_recipe, prepared, sections: dict[str, Any]) -> None:
    run = prepared(tiny_recipe(**(NODES | {"policy": [RANDOM_TIES]} | sections)))
    assert work(run) == 0
    assert len(History.load(run.path).series("train/loss")) == 10


def test_an_interrupted_run_with_a_router_resumes_to_identical_weights_and_metrics(tiny_recipe, prepared) -> None:
    """Ties are drawn, and parameters that were never reached have no state in the optimizer."""
    recipe = tiny_recipe(**NODES, policy=[RANDOM_TIES], training={"max_steps": 30}, checkpoint={"every": 2})
    resume_killed(recipe, prepared, after=(5,))


def test_elements_at_nodes_train_and_tell_what_they_kept(tiny_recipe, prepared) -> None:
    run = prepared(
        tiny_recipe(**NODES, policy=[{"name": "topk", "keep": 0.1, "along": "elements"}], measure={"probe_every": 5})
    )
    assert work(run) == 0
    history = History.load(run.path)
    assert _last(history, "policy/kept_share") == pytest.approx(0.1, abs=0.01)
    assert not {"speed/ceiling", "proof/claimed_share"} & set(history.metrics)
