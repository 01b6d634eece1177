"""Killed at any moment, a run goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder, State
from tests.chaos.kill import kill_at_random, outcome
from tests.worker.conftest import start, work

DROPOUT = {"attention_dropout": 0.1}
LONG = {
    "training": {"max_steps": 40},
    "checkpoint": {"every": 2},
    "measure": {"eval_every": 7, "probe_every": 9},
    "policy": [{"name": "random", "keep": 0.5, "along": "rows", "weighted": True}],
}


def wait_for(run: RunFolder, what: Callable[[], bool], process: Any) -> None:
    """Wait until something is so, or the worker is over."""
    while process.is_alive() and not what():
        time.sleep(0.001)


def run_trials(
    count: int, tiny_recipe: Callable[..., Recipe], prepared: Callable[[Recipe], RunFolder]
) -> tuple[int, int]:
    """Kill ``count`` runs one to three times each, resume them, and compare with the run left alone.

    Returns:
        How many kills there were, and how many of them fell into a save.
    """
    recipe = tiny_recipe(**LONG, model={"config": tiny_recipe().model.config | DROPOUT})
    straight = prepared(recipe)
    assert work(straight) == 0
    expected, chance, total, inside = outcome(straight), random.Random(0), 0, 0
    for _ in range(count):
        run = prepared(recipe)
        kills = chance.choice([1, 1, 3])
        for _ in range(kills):
            died_saving = kill_at_random(run, chance)
            total += died_saving is not None
            inside += died_saving is True
        assert run.state() in {State.INTERRUPTED, State.QUEUED, State.FINISHED}
        assert work(run) == 0
        assert run.state() is State.FINISHED
        assert outcome(run) == expected
    return total, inside


@pytest.mark.slow
@pytest.mark.promise("R1")
def test_a_killed_run_resumes_to_identical_weights_and_metrics(tiny_recipe, prepared, record_property) -> None:
    total, inside = run_trials(4, tiny_recipe, prepared)
    record_property("trials", total)
    record_property("of which", ("inside a save", inside))
    assert total >= 4
    assert inside >= 1


@pytest.mark.always("2-130")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_polite_signal_leaves_a_checkpoint_and_the_run_goes_on(tiny_recipe, prepared, number, code) -> None:
    recipe = tiny_recipe(training={"max_steps": 60}, checkpoint={"every": 1000})
    straight, run = prepared(recipe), prepared(recipe)
    assert work(straight) == 0
    process = start(run)
    wait_for(run, lambda: len(History.load(run.path).series("train/loss")) >= 3, process)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code
    assert run.state() is State.INTERRUPTED
    assert len(list((run.path / "checkpoints").glob("step-*"))) == 1
    assert work(run) == 0
    last = straight.path / "model" / "model.safetensors"
    assert (run.path / "model" / "model.safetensors").read_bytes() == last.read_bytes()
    assert History.load(run.path).series("eval/loss") == History.load(straight.path).series("eval/loss")


@pytest.mark.slow
def test_a_run_that_stopped_at_a_step_goes_on_as_if_it_had_not(tiny_recipe, prepared) -> None:
    straight, run = prepared(tiny_recipe()), prepared(tiny_recipe(checkpoint={"every": 100, "stop_at": 5}))
    assert work(straight) == work(run) == 0
    assert run.state() is State.INTERRUPTED
    assert work(run) == 0  # it stays where it is
    assert run.state() is State.INTERRUPTED
    plan = Plan.load(run.plan_file)
    checkpoint = plan.recipe.checkpoint.model_copy(update={"stop_at": None})
    plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"checkpoint": checkpoint})}).save(run.path)
    assert work(run) == 0
    model = Path("model") / "model.safetensors"
    assert (run.path / model).read_bytes() == (straight.path / model).read_bytes()


def damage_ways(file: Path) -> dict[str, Callable[[], object]]:
    """Ways in which a file goes bad."""
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[len(flipped) // 2] ^= 4
    return {
        "removed": file.unlink,
        "zeroed": lambda: file.write_bytes(b"\0" * len(content)),
        "truncated": lambda: file.write_bytes(content[: len(content) // 2]),
        "flipped": lambda: file.write_bytes(bytes(flipped)),
    }


@pytest.mark.slow
@pytest.mark.promise("R2")
def test_a_damaged_newest_checkpoint_is_passed_over_with_one_warning(tiny_recipe, prepared) -> None:
    from sparsebp_cli.worker.checkpoint import CheckpointFolder

    run = prepared(tiny_recipe())
    assert work(run) == 0
    checkpoints = CheckpointFolder(run.path / "checkpoints", keep_last=2)
    assert checkpoints.steps() == [8, 4]
    newest = run.path / "checkpoints" / "step-00000008"
    for file in sorted(newest.iterdir()):
        original = file.read_bytes()
        for way, apply in damage_ways(file).items():
            apply()
            if file.exists() and file.read_bytes() == original:
                continue
            snapshot, damaged = checkpoints.load_newest_good()
            assert snapshot is not None, way
            assert snapshot.step == 4, f"{file.name} {way} was trusted"
            assert len(damaged) == 1
            assert "step-00000008" in damaged[0]
            file.write_bytes(original)
    snapshot, damaged = checkpoints.load_newest_good()
    assert snapshot is not None
    assert (snapshot.step, damaged) == (8, [])


def test_when_no_checkpoint_is_good_the_run_stops_and_deletes_nothing(tiny_recipe, prepared) -> None:
    run = prepared(tiny_recipe(training={"max_steps": 60}))
    process = start(run)
    wait_for(run, lambda: len(History.load(run.path).series("train/loss")) >= 9, process)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    for file in (run.path / "checkpoints").glob("step-*/weights.safetensors"):
        file.write_bytes(b"not weights")
    before = sorted((run.path / "checkpoints").rglob("*"))
    assert work(run) == 1
    assert run.state() is State.FAILED
    assert "no checkpoint can be loaded" in History.load(run.path).ends[-1]["text"]
    assert sorted((run.path / "checkpoints").rglob("*")) == before


@pytest.mark.promise("R24")
def test_two_workers_never_write_one_run(tiny_recipe, prepared) -> None:
    run = prepared(tiny_recipe(training={"max_steps": 200}))
    first = start(run)
    wait_for(run, lambda: len(History.load(run.path).series("train/loss")) >= 1, first)
    assert work(run) == 101
    assert first.is_alive()
    os.kill(first.pid, signal.SIGKILL)
    first.join()


def test_a_disk_that_takes_no_more_leaves_the_last_checkpoint_and_the_run_resumes(tiny_recipe, prepared) -> None:
    recipe = tiny_recipe(training={"max_steps": 60}, checkpoint={"every": 5})
    straight, run = prepared(recipe), prepared(recipe)
    assert work(straight) == 0
    process = start(run)
    wait_for(run, lambda: bool(list((run.path / "checkpoints").glob("step-*"))), process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))  # weights need more
    process.join()
    assert process.exitcode == 1
    end = History.load(run.path).ends[-1]
    assert "cannot be written" in end["text"]
    assert "earlier checkpoints are unchanged" in end["text"]
    assert not list((run.path / "checkpoints").glob(".part-*"))
    assert list((run.path / "checkpoints").glob("step-*"))
    assert work(run) == 0
    assert outcome(run) == outcome(straight)


def test_a_full_disk_is_called_by_its_name() -> None:
    from safetensors import SafetensorError

    from sparsebp_cli.worker.ending import describe_failure

    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    for error in (SafetensorError(text), OSError(28, "No space left on device")):
        assert "the disk is full" in describe_failure(error)[0]


def test_memory_that_is_used_up_is_one_line_with_a_way_out() -> None:
    from sparsebp_cli.worker.ending import describe_failure

    def python() -> object:
        raise MemoryError

    for use in (python, lambda: bytearray(1 << 62), lambda: np.empty(1 << 57), lambda: torch.empty(1 << 58)):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            use()
        text, code = describe_failure(caught.value)
        assert code == 1
        assert re.fullmatch(r"out of memory(: [^\n]+)?; try a smaller [^\n]*", text)
        assert "MemoryError" not in text


def test_a_foreign_error_that_begins_with_an_empty_line_is_read() -> None:
    from sparsebp_cli.worker.ending import describe_failure

    text = "\n            Some tensors share memory, this will lead to duplicate memory on disk"
    assert describe_failure(RuntimeError(text))[0] == f"RuntimeError: {text.strip()}"
    assert describe_failure(RuntimeError())[0] == "RuntimeError"
