"""Check trackers: each number of an event log must arrive exactly once, whatever happens during sending."""

from __future__ import annotations

import math
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable

from sparsebp_cli import interpreter
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import JournalWriter, RunFolder, create_run
from sparsebp_cli.tracker import TrackedRun
from sparsebp_tools.tracker.door import Door, describe_run

Point = tuple[str, int, float]
Read = Callable[[TrackedRun], Iterable[Point]]

NUM_STEPS = 60
NUM_KILLED = 2  # pairs of processes
LONGEST_SECONDS = 0.1  # longest time before a kill
PATIENCE_SECONDS = 120.0
PRECISION = 1e-6  # relative: TensorBoard stores 32 bits


def check_tracker(name: str, read: Read) -> None:
    """Check a tracker against every promise; set ``$SPARSEBP_HOME`` to a temporary folder, which gets runs.

    Args:
        name: Name of an installed tracker. Child processes must find it, too.
        read: Function that returns the tracker's content for a run: metric, step and value of each stored number, with
            duplicates. Values that are not finite may be missing.

    Raises:
        AssertionError: The tracker breaks a promise; the text says which.
    """
    suite = _Suite(name, read)
    _check_whole(suite)
    _check_pieces(suite)
    _check_kills(suite)


class _Suite:
    """Create runs, and compare a tracker's content with their event logs."""

    def __init__(self, name: str, read: Read) -> None:
        self.name, self._read = name, read
        self._wanted: dict[str, dict[tuple[str, int], float]] = {}

    def make_run(self, name: str) -> RunFolder:
        content = {"version": 1, "name": name, "model": {"name": "none"}, "dataset": {"name": "none"}}
        plan = Plan(recipe=Recipe.model_validate(content | {"tracking": {"experiment": "check-tracker"}}))
        run = create_run(plan.run_id)
        plan.save(run.path)
        self._wanted[run.run_id] = {}
        return run

    def write(self, run: RunFolder, from_step: int, to_step: int, bias: float = 0.0) -> None:
        """Write what an attempt of a worker would write, with ``bias`` added to its values."""
        wanted = self._wanted[run.run_id]
        with JournalWriter(run.path, durable=False) as journal:
            journal.write("attempt", from_step=from_step, environment={"python": "3"})
            for step in range(from_step + 1, to_step + 1):
                values = {"train/loss": 3.0 / step + bias, "odd": math.nan if step % 7 else math.inf}
                evaluation = {"eval/loss": 2.0 + 1.0 / step + bias} if step % 5 == 0 else {}
                for part in filter(None, (values, evaluation)):  # two records of one step
                    journal.write("metrics", step=step, values=part)
                for metric, value in (values | evaluation).items():
                    wanted.setdefault((metric, step), value)  # the first value of a step counts
            journal.write("note", level="info", text=f"at step {to_step}")
            journal.write("end", status="interrupted", step=to_step, text="")

    def compare(self, run: RunFolder, promise: str) -> None:
        """Require that the tracker has each number of the event log exactly once."""
        found = [(metric, int(step), float(value)) for metric, step, value in self._read(_describe(run))]
        wanted = self._wanted[run.run_id]
        counts = Counter((metric, step) for metric, step, _ in found)
        twice = [key for key, count in counts.items() if count > 1]
        _require(not twice, f"{promise}: {len(twice)} numbers are there more than once, such as {twice[:1]}")
        finite = {key for key, value in wanted.items() if math.isfinite(value)}
        lost = sorted(finite - counts.keys())
        _require(not lost, f"{promise}: {len(lost)} numbers are lost, such as {lost[:1]}")
        more = sorted(counts.keys() - wanted.keys())
        _require(not more, f"{promise}: {len(more)} numbers are of nothing in the event log, such as {more[:1]}")
        for metric, step, value in found:
            expected = wanted[metric, step]
            if math.isfinite(expected):
                alike = math.isclose(value, expected, rel_tol=PRECISION)
                _require(alike, f"{promise}: {metric} at step {step} should be {expected}, is {value}")
            else:
                text = f"{promise}: {metric} at step {step} is {expected}, and must not be shown as {value}"
                _require(not math.isfinite(value), text)


def _describe(run: RunFolder) -> TrackedRun:
    return describe_run(Plan.load(run.plan_file))


def _send(suite: _Suite, run: RunFolder) -> None:
    door = Door(run, suite.name)
    door.send()
    _require(bool(door.place), "a session says at its place where the run can be seen")
    door.close()


def _check_whole(suite: _Suite) -> None:
    one, other = suite.make_run("one"), suite.make_run("two")
    for run, bias in ((one, 0.0), (other, 10.0)):
        suite.write(run, 0, NUM_STEPS, bias)
        _send(suite, run)
    for run in (one, other):
        suite.compare(run, "write() stores each number of a run")
    _send(suite, one)
    suite.compare(one, "a second session that is given all again changes nothing")
    suite.write(one, NUM_STEPS // 2, NUM_STEPS + 10, bias=1.0)
    _send(suite, one)
    suite.compare(one, "a resumed run goes on after its end, and what it repeats is there once")


def _check_pieces(suite: _Suite) -> None:
    run = suite.make_run("pieces")
    doors = [Door(run, suite.name, batch=batch) for batch in (1, 7)]
    for number in range(6):
        suite.write(run, 10 * number, 10 * number + 10)
        doors[number % 2].send()
        suite.compare(run, "write() returns when the records are stored, and of two sessions in turn neither repeats")
    for door in doors:
        door.send()
        door.close()
    suite.compare(run, "two sessions that have sent all in turn store each number once")


def _check_kills(suite: _Suite) -> None:
    draw = random.Random(0)
    for number in range(NUM_KILLED):
        run = suite.make_run(f"killed-{number}")
        suite.write(run, 0, 4 * NUM_STEPS)
        module = ("-m", "sparsebp_tools.tracker.sender", str(run.path), suite.name)
        processes = [
            subprocess.Popen(
                interpreter.command(*module, str(draw.uniform(0.001, LONGEST_SECONDS))),
                env=interpreter.environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for _ in range(2)
        ]
        for process in processes:
            _, said = process.communicate(timeout=PATIENCE_SECONDS)
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            _require(process.returncode == -signal.SIGALRM, f"a child process sends until it is killed: {last}")
        _send(suite, run)
        suite.compare(run, "after a kill the next session stores what is missing, and nothing twice")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)
