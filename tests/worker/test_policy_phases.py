"""A schedule of policies is a loop that detaches one and attaches the next, whatever interrupts it."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import get_scheduler

import sparsebp_cli as sbp
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, JournalWriter, RunFolder, State
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.data import build_data
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.model import build_model, build_tokenizer
from sparsebp_cli.worker.selection_gain import describe_gains
from sparsebp_cli.worker.training import Training
from tests.chaos.kill import difference, outcome
from tests.worker.conftest import LLAMA, start, work
from tests.worker.ranks import make_run, train_alone, train_on_two

DENSE = [{"name": "dense"}]
ROWS = [{"name": "topk", "keep": 0.25, "along": "rows"}]
FEEDBACK = [{"name": "topk", "keep": 0.3, "along": "columns", "error_feedback": True}]
DRAWN = [{"name": "random", "keep": 0.5, "along": "rows", "weighted": True}]
DROPOUT = {"config": LLAMA | {"attention_dropout": 0.1}}


def phases(first: list[dict[str, Any]], second: list[dict[str, Any]], until: float = 0.4) -> list[dict[str, Any]]:
    return [{"until": until, "policy": first}, {"policy": second}]


def finish(run: RunFolder) -> RunFolder:
    assert work(run) == 0, (run.path / "worker.log").read_text()
    assert run.state() is State.FINISHED
    return run


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    (file,) = (run.path / "model").glob("*.safetensors")  # adapters have a name of their own
    return load_file(file)


def assert_same_training(run: RunFolder, other: RunFolder) -> None:
    one, two = weights(run), weights(other)
    assert all(torch.equal(one[name], two[name]) for name in one)
    for name in ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss"):
        assert History.load(run.path).series(name) == History.load(other.path).series(name), name


def loop_by_hand(recipe: Recipe, policies: list[list[dict[str, Any]]], boundary: int) -> dict[str, torch.Tensor]:
    """What a user of the library would write: another engine from a step on."""
    training = recipe.training
    torch.manual_seed(training.seed)
    tokenizer = build_tokenizer(recipe.model)
    data = build_data(recipe.dataset, tokenizer)
    torch.manual_seed(training.seed)
    model = build_model(recipe.model, tokenizer, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    schedule = get_scheduler("linear", optimizer, training.warmup_steps, training.max_steps)
    order = BatchOrder(data.train, training.per_device_train_batch_size, training.seed, tokenizer.pad_token_id)
    given = {"optimizer": optimizer, "seed": training.seed, "num_steps": training.max_steps}
    engine = sbp.attach(model, policies[0], **given)
    for step in range(training.max_steps):
        if step == boundary:
            engine.detach()
            engine = sbp.attach(model, policies[1], **given)
            engine.load_state_dict(engine.state_dict() | {"index": step})
        batch = order[step]
        count = torch.tensor(int((batch["labels"][:, 1:] != -100).sum()))
        engine.backward(model(**batch, num_items_in_batch=count).loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    engine.detach()
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    "policies", [(DENSE, ROWS), (FEEDBACK, DRAWN), (DRAWN, FEEDBACK)], ids=["dense-rows", "feedback-drawn", "reverse"]
)
def test_a_schedule_equals_a_loop_that_detaches_and_attaches(tiny_recipe, prepared, policies) -> None:
    torch.set_num_threads(1)
    recipe = tiny_recipe(schedule=phases(*policies), measure={"probe_every": 3, "fidelity_every": 2})
    saved, expected = weights(finish(prepared(recipe))), loop_by_hand(recipe, policies, boundary=4)
    assert all(torch.equal(saved[name], expected[name]) for name in saved)


@pytest.mark.always("eager", "lora-autocast")
@pytest.mark.parametrize(
    "sections",
    [
        {"model": DROPOUT},
        {"backward": {"update": "eager", "eager_clip": "previous"}, "training": {"max_grad_norm": 0.3}},
        {"backward": {"segments": 2}},
        {"backward": {"sites": "nodes"}},
        {"backward": {"checkpointing": "full"}, "training": {"gradient_accumulation_steps": 2}},
        {"model": {"config": LLAMA, "float8": "emulated"}},
        {"model": {"config": LLAMA, "lora": {"r": 4}}, "training": {"mixed_precision": "bf16"}},
    ],
    ids=["dropout", "eager", "segments", "nodes", "checkpointing", "float8", "lora-autocast"],
)
def test_two_phases_of_one_stateless_policy_equal_one_phase(tiny_recipe, prepared, sections) -> None:
    """Whatever of the backward is made anew at the boundary leaves no trace, dense or sparse."""
    for policy in (DENSE, DRAWN):
        alone = finish(prepared(tiny_recipe(policy=policy, **sections)))
        twice = finish(prepared(tiny_recipe(schedule=phases(policy, policy), **sections)))
        assert_same_training(alone, twice)


def kill_after(run: RunFolder, step: int) -> None:
    """Kill the worker with SIGKILL once it has the checkpoint of a step; newer ones are removed, as if it had died
    before it could write them."""
    checkpoints, process = run.path / "checkpoints", start(run)
    while process.is_alive() and not (checkpoints / f"step-{step:08d}").exists():
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    for newer in checkpoints.glob("step-*"):
        if int(newer.name.removeprefix("step-")) > step:
            shutil.rmtree(newer)


MEASURED = {"eval_every": 3, "probe_every": 3, "fidelity_every": 4}
PAIRS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "feedback in both": (FEEDBACK, FEEDBACK),
    "rows, then tokens": (ROWS, [{"name": "tokens", "score": "loss", "keep": 0.4, "mode": "detach"}]),
    "tokens, then dense": ([{"name": "tokens", "score": "random", "keep": 0.4}], DENSE),
    "frozen in turn, then dense": ([{"name": "frozen", "turn": "layers", "every": 2}], DENSE),
    "dense, then frozen in turn without state": (
        DENSE,
        [{"name": "frozen", "turn": "layers", "every": 2, "optimizer_state": "drop"}],
    ),
    "examples, then blocks": (
        [{"name": "uniform", "keep": 0.5, "start": 0.0, "end": 1.0}],
        [{"name": "dropbp", "keep": 0.5}],
    ),
    "saved inputs, then a falling share": (
        [{"name": "wta-crs", "keep": 0.5}],
        [{"name": "topk", "keep": {"from": 1.0, "to": 0.2}, "along": "rows"}],
    ),
}


@pytest.mark.always("rows, then tokens")
@pytest.mark.parametrize("pair", PAIRS)
def test_a_run_killed_in_each_phase_and_at_the_boundary_ends_as_if_left_alone(tiny_recipe, prepared, pair) -> None:
    recipe = tiny_recipe(
        schedule=phases(*PAIRS[pair]), model=DROPOUT, measure=MEASURED, checkpoint={"every": 1, "keep_last": 20}
    )
    straight, run = finish(prepared(recipe)), prepared(recipe)
    for step in (2, 4, 5, 7):  # in the first phase, at the boundary, after its first step, in the second phase
        kill_after(run, step)
        assert run.state() is State.INTERRUPTED
    assert difference(outcome(straight), outcome(finish(run))) == []


def test_the_state_of_a_policy_begins_with_its_phase(tiny_recipe, prepared) -> None:
    """With error feedback, two phases of one policy are not one: what the first has cut is not added in the second."""
    alone = finish(prepared(tiny_recipe(policy=FEEDBACK)))
    twice = finish(prepared(tiny_recipe(schedule=phases(FEEDBACK, FEEDBACK))))
    losses = [History.load(run.path).series("train/loss") for run in (alone, twice)]
    differs = [step for step in losses[0] if losses[0][step] != losses[1][step]]
    assert differs[0] == 6, "step 5 is the first without what was cut, and changes the weights of the next"


def test_each_phase_has_its_own_probe_claims_and_note(tiny_recipe, prepared) -> None:
    three = [{"until": 0.2, "policy": DENSE}, {"until": 0.6, "policy": ROWS}, {"policy": DRAWN}]
    run = finish(prepared(tiny_recipe(schedule=three, measure={"probe_every": 50, "fidelity_every": None})))
    history = History.load(run.path)
    claimed, executed = history.series("proof/claimed_share"), history.series("proof/executed_share")
    assert list(claimed) == [2, 6, 10]
    assert claimed == pytest.approx({2: 1.0, 6: 0.25, 10: 0.5}, abs=0.01)
    assert executed == pytest.approx(claimed, abs=0.02)
    texts = [text for _, _, text in history.notes]
    assert "phase 2 of 3 begins after step 2: topk until 0.6" in texts
    assert "phase 3 of 3 begins after step 6: random" in texts
    assert [policy["name"] for policy in history.facts["policies"]] == ["dense", "topk", "random"]


@pytest.mark.xdist_group("two processes")
def test_two_processes_change_policies_as_one_does(tiny_recipe, tmp_path) -> None:
    rows = [{"name": "topk", "keep": 0.25, "along": "rows", "within": "example"}]
    kept = [rows[0] | {"error_feedback": True}]
    schedules = [phases(DENSE, rows), phases(kept, DENSE), phases(DENSE, DENSE)]
    shared: dict[str, Any] = {"training": {"learning_rate": 3e-3}, "measure": {"fidelity_every": 3}}
    alone = [make_run(tiny_recipe(schedule=schedule, **shared), tmp_path) for schedule in schedules]
    shared["training"] |= {"per_device_train_batch_size": 2}
    shared["target"] = {"processes": 2, "sharding": "none"}
    together = [make_run(tiny_recipe(schedule=schedule, **shared), tmp_path) for schedule in schedules]
    together.append(make_run(tiny_recipe(policy=DENSE, **shared), tmp_path))
    train_alone(alone)
    train_on_two(together)
    for one, both in zip(alone, together, strict=False):
        expected, found = weights(one), weights(both)
        for name, tensor in expected.items():  # sums over the batch are added up in another order
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-4)
    twice, dense = weights(together[2]), weights(together[3])
    assert all(torch.equal(twice[name], dense[name]) for name in dense)


def test_a_preview_measures_each_phase_and_the_whole(tiny_recipe, prepared) -> None:
    run = prepared(tiny_recipe(schedule=phases(DENSE, ROWS, until=0.5), measure={"fidelity_every": None}))
    stop = StopRequest()
    with JournalWriter(run.path, durable=False) as journal:
        training = Training.build(Plan.load(run.plan_file), run, journal, stop)
        before = {name: parameter.detach().clone() for name, parameter in training.bare.named_parameters()}
        found = describe_gains(list(training.measure_gains()))
    assert all(torch.equal(before[name], parameter) for name, parameter in training.bare.named_parameters())
    lines, values = found["lines"], found["values"]
    assert lines[-1].startswith("the whole schedule executes ")
    assert any(line.startswith("phase 2: forward and backward of the first step take ") for line in lines)
    alone = prepared(tiny_recipe(policy=ROWS, measure={"fidelity_every": None}))
    with JournalWriter(alone.path, durable=False) as journal:
        ((_, gain),) = Training.build(Plan.load(alone.plan_file), alone, journal, stop).measure_gains()
    assert values["choice/cost_ratio"] == pytest.approx((1.0 + gain.cost_ratio) / 2, abs=0.01)


def test_a_limit_of_work_counts_each_phase_at_its_own_cost(tiny_recipe, prepared) -> None:
    training = {"max_steps": 20, "max_cost": 12.0}
    measure = {"probe_every": 50, "fidelity_every": None}
    run = finish(prepared(tiny_recipe(schedule=phases(DENSE, ROWS, until=0.5), training=training, measure=measure)))
    history = History.load(run.path)
    costs = history.series("choice/cost_ratio")
    assert list(costs) == [0, 11], "measured at the start of each phase"
    assert costs[0] == pytest.approx(1.0)
    left = 2.0 / costs[11]
    assert left > 2.5
    assert len(history.series("train/loss")) == 10 + math.ceil(left)
