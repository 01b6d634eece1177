"""A run times its forms once, tells and stores it, and goes on with it wherever it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sparsebp_cli.backward.linear import timing
from sparsebp_cli.backward.linear.timing import Masked
from sparsebp_cli.cli.rerun import prepare, read_finished
from sparsebp_cli.cli.summary import summary_rows
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.run.break_even import read_use
from sparsebp_cli.run.policy_phase import read_phases
from tests.worker.ranks import make_run, train_alone, train_on_two

ROWS = [{"name": "topk", "keep": 0.25, "along": "rows"}]
Give = Callable[[Callable[[int], float]], None]


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Give:
    """Give the milliseconds that rows take at a number of outputs, where masking takes one."""

    def set_seconds(seconds: Callable[[int], float]) -> None:
        def timer(run: Any) -> float:
            source, grad_NO = run.args[:2]
            return 1e-3 * (1.0 if isinstance(source.selection, Masked) else seconds(grad_NO.shape[1]))

        monkeypatch.setattr(timing, "_make_timer", lambda _: timer)

    return set_seconds


def never(_: int) -> float:
    raise AssertionError("something was timed")


@pytest.fixture
def timed(tiny_recipe: Callable[..., Recipe]) -> Callable[..., Recipe]:
    """Make a recipe that times its forms, with a probe that holds claimed against executed work."""

    def make(**sections: Any) -> Recipe:
        given = {"policy": ROWS, "backward": {"time_forms": True}, "training": {"max_steps": 2}}
        given |= {"checkpoint": {"every": 5}, "measure": {"eval_every": 2, "eval_examples": 2, "eval_batches": None}}
        return tiny_recipe(**given | sections)

    return make


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.path / "model" / "model.safetensors")


def test_it_is_told_and_counted_and_decides_after_a_stop(timed, give, tmp_path: Path) -> None:
    give(lambda outputs: 2.0 if outputs == 32 else 0.5)  # of attention's first and last linears, and the MLP's last
    measure = {"eval_every": 2, "eval_examples": 2, "eval_batches": None, "probe_every": 2}
    straight, stopped = make_run(timed(measure=measure), tmp_path), make_run(timed(checkpoint={"stop_at": 1}), tmp_path)
    train_alone([straight, stopped])
    give(never)
    train_alone([_resumed(stopped, timed())])
    one, two = weights(straight), weights(stopped)
    assert all(torch.equal(one[name], two[name]) for name in one)
    history = History.load(straight.path)
    notes = [text for _, _, text in history.notes]
    assert notes[0].startswith("timing 5 forms of products at linears, for at most 10 s")
    text, used = read_use(history.facts)
    assert text == notes[1]
    assert text.startswith("6 of 15 linears mask what is selected and multiply densely, which was faster; 4 with rows")
    assert used == ["Rows 32x16 used", "Rows 32x300 used", "Rows 32x32 masked", "Rows 32x64 used", "Rows 64x32 masked"]
    phases = read_phases(straight.read_plan()["recipe"])
    assert dict(summary_rows(history, phases))["forms"] == text
    assert max(history.series("proof/excess_share").values()) == 0.0
    assert 0.25 < min(history.series("proof/executed_share").values()) < 1.0


def _resumed(run: RunFolder, recipe: Recipe) -> RunFolder:
    from sparsebp_cli.plan import Plan

    plan = Plan.load(run.plan_file)
    plan.model_copy(update={"recipe": recipe}).save(run.path)
    return run


def test_a_run_without_a_checkpoint_yet_and_a_repetition_take_the_journals(timed, give, tmp_path: Path) -> None:
    give(lambda _: 2.0)
    run = make_run(timed(), tmp_path)
    train_alone([run])
    assert read_use(History.load(run.path).facts)[0].startswith("15 of 15 linears")
    give(never)
    again = prepare(*read_finished(run), anyway=False, forms=History.load(run.path).facts["forms"])
    train_alone([again])  # its journal has the times, and it has no checkpoint
    one, two = weights(run), weights(again)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_without_the_key_nothing_is_timed_and_dense_times_nothing(tiny_recipe, timed, give, tmp_path: Path) -> None:
    give(never)
    plain = make_run(tiny_recipe(policy=ROWS, training={"max_steps": 1}), tmp_path)
    dense = make_run(timed(policy=[{"name": "dense"}], training={"max_steps": 1}), tmp_path)
    train_alone([plain, dense])
    assert read_use(History.load(plain.path).facts) == ("", [])
    assert read_use(History.load(dense.path).facts)[1] == []


@pytest.mark.long
def test_two_processes_take_what_the_first_timed(timed, tmp_path: Path) -> None:
    recipe = timed(target={"processes": 2, "sharding": "none"})
    run = make_run(recipe, tmp_path)
    train_on_two([run])  # by the clock: that the second process takes it is tested without
    assert read_use(History.load(run.path).facts)[1]
    assert list(History.load(run.path).series("train/loss")) == [1, 2]
