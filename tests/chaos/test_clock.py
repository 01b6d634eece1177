"""The time of day jumps by minutes to years while clients work: they end as with a clock that goes."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from sparsebp_cli.run import History, RunFolder, State, list_runs
from sparsebp_cli.target.launch import find_worker
from tests.chaos.clock import Clock, needs_compiler
from tests.cli.conftest import Cli, Start, Write, cli, start, write_recipe
from tests.target.conftest import until, wait_for_step
from tests.target.fake_worker import measure

__all__ = ["cli", "start", "write_recipe"]
pytestmark = [needs_compiler, pytest.mark.promise("R9"), pytest.mark.usefixtures("no_process_left")]


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that every process has that is started from now on."""
    found = Clock(tmp_path)
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    return found


def check_run(verbs: Sequence[str], cli: Cli, write_recipe: Write, clock: Clock, chance: random.Random) -> None:
    """A run that is followed ends with every step once, and verbs read it."""
    known = {run.run_id for run in list_runs()}
    with clock.jumping(chance):
        done = cli("run", write_recipe("steady"))
        assert done.returncode == 0, done.stderr
        (run,) = (run for run in list_runs() if run.run_id not in known)
        for verb in verbs:
            found = cli(verb, run.run_id)
            assert found.returncode == 0, (verb, found.stderr)
    assert run.state() is State.FINISHED
    losses = {step: measure(step)["train/loss"] for step in range(1, 31)}
    assert History.load(run.path).series("train/loss") == losses
    assert len(History.load(run.path).environments) == 1


def check_cancel(start: Start, cli: Cli, write_recipe: Write, clock: Clock, chance: random.Random) -> None:
    """A worker that ignores signals is killed after the time that was given it, which no jump makes longer."""
    known = {run.run_id for run in list_runs()}
    with clock.jumping(chance):
        client = start("run", write_recipe("stubborn", "stubborn"))
        until(lambda: len(list_runs()) > len(known))
        (run,) = (run for run in list_runs() if run.run_id not in known)
        wait_for_step(run)
        done = cli("cancel", run.run_id, "--grace", "1")
        assert (done.returncode, done.stdout.split()) == (0, [run.run_id, "cancelled"]), done.stderr
        assert client.wait(60) == 103
    assert run.state() is State.CANCELLED


def check_resume(start: Start, cli: Cli, write_recipe: Write, clock: Clock, chance: random.Random) -> None:
    """A run whose worker was killed, at whatever time, is resumed by the next command, and no step is lost."""
    known = {run.run_id for run in list_runs()}
    with clock.jumping(chance):
        start("run", write_recipe("steady", "resumed"))
        until(lambda: len(list_runs()) > len(known))
        (run,) = (run for run in list_runs() if run.run_id not in known)
        wait_for_step(run)
        stop(run)
        done = cli("resume", run.run_id)
        assert done.returncode == 0, done.stderr
    assert run.state() is State.FINISHED
    assert list(History.load(run.path).series("train/loss")) == list(range(1, 31))


def stop(run: RunFolder) -> None:
    """Interrupt a worker, and wait until nobody works at the run."""
    if worker := find_worker(run):
        worker.send_signal(signal.SIGTERM)
    until(lambda: not run.is_locked("worker") and not run.is_locked("target"))


@pytest.mark.slow
def test_clients_end_as_ever_while_the_clock_jumps(start, cli, write_recipe, clock, record_property) -> None:
    chance = random.Random(0)
    check_run(["show"], cli, write_recipe, clock, chance)
    check_cancel(start, cli, write_recipe, clock, chance)
    assert clock.jumps > 9
    record_property("trials", 2)


@pytest.mark.chaos
@pytest.mark.timeout(3000)  # of a busy machine, too
def test_clients_end_as_ever_in_many_stories_while_the_clock_jumps(
    start, cli, write_recipe, clock, record_property
) -> None:
    chance = random.Random(1)
    for _ in range(5):
        check_run(["show", "compare", "logs"], cli, write_recipe, clock, chance)
        check_cancel(start, cli, write_recipe, clock, chance)
        check_resume(start, cli, write_recipe, clock, chance)
    record_property("trials", 15)
