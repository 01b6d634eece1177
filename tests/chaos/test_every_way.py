"""Damaged checkpoints, full disks and polite signals in every way of training: what is kept is whole, and each run ends
as one that was left alone."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder, State, manifest
from tests.chaos.kill import difference, outcome
from tests.chaos.test_faults import copy_of, damage
from tests.chaos.test_kills import reference, sections
from tests.chaos.way import WAYS
from tests.worker.conftest import start, work

__all__ = ["reference"]
# The tests of one way run in one process, which trains what is expected of it once.
EACH = [pytest.param(way, marks=pytest.mark.xdist_group(way)) for way in WAYS]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3000), pytest.mark.parametrize("way", EACH)]
SHORT: dict[str, Any] = {"checkpoint": {"every": 2}, "measure": {"eval_every": 5, "probe_every": 6}}
DAMAGES, SIGNALS, DISKS = 1, (signal.SIGTERM,), 1  # trials a way
Outcome = dict[str, Any]
_EXPECTED: dict[str, Outcome] = {}


@pytest.fixture
def recipe(way: str, tiny_recipe: Callable[..., Recipe], reference: str) -> Recipe:
    """Twelve steps of a way, a checkpoint every two."""
    given = sections(way, reference)
    return tiny_recipe(**given | SHORT | {"training": given["training"] | {"max_steps": 12}})


@pytest.fixture
def expected(way: str, recipe: Recipe, prepared: Callable[[Recipe], RunFolder]) -> Outcome:
    """What a run that is left alone comes to."""
    if way not in _EXPECTED:
        straight = prepared(recipe)
        assert work(straight) == 0, straight.log_file.read_text()
        _EXPECTED[way] = outcome(straight)
    return _EXPECTED[way]


def started(run: RunFolder, is_time: Callable[[RunFolder], bool]) -> Any:
    """Start a worker, and return when it is time for a fault, or when it is over."""
    process = start(run)
    while process.is_alive() and not is_time(run):
        time.sleep(0.002)
    return process


def num_checkpoints(run: RunFolder) -> int:
    return len(list((run.path / "checkpoints").glob("step-*")))


def num_steps(run: RunFolder) -> int:
    journal = run.path / "journal.jsonl"
    return journal.read_bytes().count(b'"train/loss"') if journal.exists() else 0


def differing(expected: Outcome, found: Outcome) -> list[str]:
    """Name the files and metrics in which two outcomes differ. The peak memory of a step is left out: in the first
    step of a process a policy that scores allocates a kilobyte more, and it may be measured in that of a resumed run.
    """
    return [name for name in difference(expected, found) if "memory/step_peak_" not in name]


def check_end(run: RunFolder, expected: Outcome, what: str) -> Iterator[str]:
    """Resume a run, and yield in what it differs from one that was left alone."""
    for checkpoint in (run.path / "checkpoints").glob("step-*"):
        if found := manifest.find_damage(checkpoint):
            yield f"{what}: {checkpoint.name}: {found}"
    if work(run) != 0 or run.state() is not State.FINISHED:
        yield f"{what}: {run.state()}"
    else:
        yield from (f"{what}: {name}" for name in differing(expected, outcome(run)))


@pytest.mark.promise("R2")
def test_a_damaged_checkpoint_costs_no_policy_its_result(way, recipe, expected, prepared, record_property) -> None:
    broken, chance, wrong = prepared(recipe), random.Random(way), []
    process = started(broken, lambda run: num_checkpoints(run) >= 2)
    process.kill()
    process.join()
    assert num_checkpoints(broken) >= 2
    for number in range(DAMAGES):
        run = copy_of(broken, number)
        newest = max((run.path / "checkpoints").glob("step-*"))
        file = chance.choice([path for path in sorted(newest.iterdir()) if path.stat().st_size])
        what = f"{file.name} {damage(file, chance)}"
        if work(run) != 0 or differing(expected, outcome(run)):
            wrong.append(what)
        warned = [note for note in History.load(run.path).notes if newest.name in str(note)]
        if len(warned) != 1:
            wrong.append(f"{what}: {len(warned)} warnings")
        shutil.rmtree(run.path)
    record_property("trials", DAMAGES)
    assert not wrong


@pytest.mark.promise("R4")
def test_a_polite_signal_costs_no_policy_its_result(way, recipe, expected, prepared, record_property) -> None:
    run, chance, sent, wrong = prepared(recipe), random.Random(way), 0, []
    for number in SIGNALS:
        before, wanted = num_steps(run), chance.randrange(4)
        process = started(run, lambda run, least=before + wanted: num_steps(run) > least)
        if process.is_alive():
            os.kill(process.pid, number)
        process.join()
        if process.exitcode == 0:
            break  # it was at its end
        sent += 1
        if process.exitcode != 128 + number or num_checkpoints(run) == 0:
            wrong.append(f"{number.name}: exit code {process.exitcode}, {num_checkpoints(run)} checkpoints")
    wrong += check_end(run, expected, "signals")
    record_property("trials", sent)
    assert sent
    assert not wrong


@pytest.mark.promise("R3")
def test_a_full_disk_costs_no_policy_its_result(way, recipe, expected, prepared, record_property) -> None:
    chance, stopped, wrong = random.Random(way), 0, []
    for _ in range(DISKS):
        run, steps = prepared(recipe), chance.randrange(8)
        process = started(run, lambda run, least=steps: num_steps(run) > least)
        if process.is_alive():
            # No file of the process may grow beyond this: what a full disk does, at a place that chance decides.
            room = chance.randrange(1000, 40_000)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        process.join()
        stopped += process.exitcode != 0
        if list((run.path / "checkpoints").glob(".part-*")) or "Traceback" in run.log_file.read_text():
            wrong.append(f"{room}: {run.log_file.read_text()[-300:]}")
        wrong += check_end(run, expected, f"{room} bytes")
    record_property("trials", DISKS)
    record_property("of which", ("stopped by it", stopped))
    assert not wrong
