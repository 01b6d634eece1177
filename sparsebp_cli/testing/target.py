"""PUBLIC. Conformance suite of targets: it checks every promise on a real target, with a worker that trains nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from sparsebp_cli.errors import RunBusyError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder, State, create_run
from sparsebp_cli.target import Job, Target, make_target
from sparsebp_cli.target.launch import Launch
from sparsebp_cli.target.remote import RemoteTarget

WORKER = "sparsebp_cli.testing.worker"
PATIENCE_SECONDS = 120.0
NUM_STEPS = 12


def check_target(target: str | Target, **options: object) -> None:
    """Check a target against every promise of its contract. Runs are created under ``$SPARSEBP_HOME``: set it to a
    temporary folder.

    Args:
        target: The name of an installed kind of target, or a target.
        **options: Options of the target. Its workers must be able to import ``sparsebp_cli``.

    Raises:
        AssertionError: The target breaks a promise, which the text names.
    """
    section = {"kind": target, "worker": WORKER, **options} if isinstance(target, str) else {}
    suite = _Suite(section, None if isinstance(target, str) else target)
    _check_findings(suite)
    _check_command(suite)
    _check_finish(suite)
    _check_stop(suite)
    _check_kill(suite)
    _check_failures(suite)
    _check_dispatcher_lost(suite)
    _check_queue(suite)


class _Suite:
    """Makes runs for one target."""

    def __init__(self, section: dict[str, object], target: Target | None) -> None:
        self.section = section
        self.target = target or make_target(Recipe.model_validate(self._recipe("ok")).target)

    def _recipe(self, fake: str) -> dict[str, object]:
        return {
            "version": 1,
            "name": f"check-{fake}",
            "model": {"name": "none"},
            "dataset": {"name": "none"},
            "training": {"max_steps": NUM_STEPS},
            # tracking refuses this address before it imports mlflow, which takes seconds
            "tracking": {"uri": "file:///nowhere", "tags": {"fake": fake}},
            "target": self.section,
        }

    def make_run(self, fake: str = "ok") -> RunFolder:
        plan = Plan(recipe=Recipe.model_validate(self._recipe(fake)))
        run = create_run(plan.run_id)
        plan.save(run.path)
        return run

    def finish(self, job: Job, expected: State, promise: str) -> None:
        state = job.wait(PATIENCE_SECONDS)
        _require(state is expected, f"{promise}: the run should be {expected}, is {state} ({job.warning()})")
        _require(job.settled(), f"{promise}: the job should be settled")


def _check_findings(suite: _Suite) -> None:
    findings = list(suite.target.check())
    bad = [f"{finding.what}: {finding.text}" for finding in findings if finding.level == "fail"]
    _require(bool(findings) and not bad, f"check() finds the target usable: {', '.join(bad) or 'no finding'}")


def _check_command(suite: _Suite) -> None:
    run = suite.make_run()
    before = sorted(run.path.iterdir())
    command = suite.target.command(run)
    _require(command == suite.target.command(run), "command() returns the same each time")
    suite.target.files(run)
    _require(sorted(run.path.iterdir()) == before and run.state() is State.QUEUED, "command() changes nothing")
    _require(all(isinstance(word, str) for word in command) and bool(command), "command() returns words")


def _check_finish(suite: _Suite) -> None:
    run = suite.make_run()
    job = suite.target.submit(run)
    suite.finish(job, State.FINISHED, "a run that ends well is finished")
    history = History.load(run.path)
    losses = {step: 4.0 / (1 + 0.01 * step) for step in range(1, NUM_STEPS + 1)}
    _require(history.series("train/loss") == losses, "each logged number arrives once and unchanged")
    _require([end["status"] for end in history.ends] == ["finished"], "the event log has one end")
    _require(job.exit_code() == 0, "the exit code of a run that ends well is 0")
    _require((job.fetch() / "model" / "state.json").read_text() == str(NUM_STEPS), "the model is fetched")
    _require(suite.target.reattach(run).status() is State.FINISHED, "reattach() finds a finished run")
    _require(job.cancel() is State.FINISHED and not run.cancel_file.exists(), "cancel() leaves a finished run alone")
    if isinstance(suite.target, RemoteTarget):
        _require(suite.target.engine.find(run) is None, "no files of a fetched run stay on the engine")


def _check_stop(suite: _Suite) -> None:
    run = suite.make_run("slow")
    job = suite.target.submit(run)
    _wait_for_step(run, 2)
    _require(job.status() is State.RUNNING, "a run whose worker trains is running")
    _check_fence(suite, run)
    job.stop()
    suite.finish(job, State.INTERRUPTED, "stop() interrupts a run")
    steps = History.load(run.path).series("train/loss")
    again = suite.target.submit(run)
    _wait_for_step(run, max(steps) + 2)
    history = History.load(run.path)
    _require(history.warm[-1] == (2, max(steps)), "a resumed run goes on from its checkpoint, under the same id")
    _require(list(history.series("train/loss")) == list(range(1, len(history.series("train/loss")) + 1)), "no gaps")
    _require(again.cancel() is State.CANCELLED, "cancel() cancels a run")
    suite.finish(again, State.CANCELLED, "a cancelled run stays cancelled")
    ends = [end["status"] for end in History.load(run.path).ends]
    _require(ends == ["interrupted", "interrupted", "cancelled"], f"cancel() leaves a checkpoint and one end: {ends}")
    _require(suite.target.reattach(run).cancel() is State.CANCELLED, "cancelling twice changes nothing")
    printed = [line for line in again.logs() if line.startswith("test worker: slow from step")]
    _require(len(printed) in {0, 2}, f"logs() has the output of each attempt once: {printed}")


def _check_fence(suite: _Suite, run: RunFolder) -> None:
    try:
        suite.target.submit(run)
    except RunBusyError:
        return
    raise AssertionError(
        "submit() must raise RunBusyError for a run that is being worked on, but it started the run again"
    )


def _check_kill(suite: _Suite) -> None:
    run = suite.make_run("stubborn")
    job = suite.target.submit(run)
    _wait_for_step(run, 1)
    job.stop()
    job.kill()
    suite.finish(job, State.INTERRUPTED, "kill() ends a worker that ignores stop()")
    again = suite.target.submit(run)
    _wait_for_attempt(run, 2)
    _require(again.cancel(grace_seconds=0.5) is State.CANCELLED, "cancel() kills the worker after grace_seconds")
    suite.finish(again, State.CANCELLED, "a killed run stays cancelled")


def _check_failures(suite: _Suite) -> None:
    for fake, code, text in (
        ("fail", 1, "RuntimeError: the test worker broke"),
        ("data-error", 2, "dataset.name: no such file: x.txt"),
    ):
        run = suite.make_run(fake)
        job = suite.target.submit(run)
        suite.finish(job, State.FAILED, f"a worker that ends with {code} has failed")
        _require(job.exit_code() == code, f"the exit code {code} is kept, got {job.exit_code()}")
        _require(History.load(run.path).ends[-1]["text"] == text, f"the reason is kept: {text}")


def _check_dispatcher_lost(suite: _Suite) -> None:
    run = suite.make_run("slow")
    suite.target.submit(run)
    _wait_for_step(run, 1)
    launch = Launch.load(run)
    process = launch.watcher(run) if launch else None
    if process is not None:  # a target inside this process has no dispatcher process
        process.kill()
        _until(lambda: not run.is_locked("target"), "the lock of a dead remote runner is free")
        _require(not run.state().over, "a run whose remote runner was killed is not over")
    job = suite.target.reattach(run)
    reached = max(History.load(run.path).series("train/loss"))
    if isinstance(suite.target, RemoteTarget):  # a local run needs no dispatcher to copy its journal
        _wait_for_step(run, reached + 2)
    _require(job.status() is State.RUNNING, "reattach() finds the live worker")
    _check_fence(suite, run)
    _require(job.cancel() is State.CANCELLED, "a run that was found again can be cancelled")
    job.wait(PATIENCE_SECONDS)


def _check_queue(suite: _Suite) -> None:
    runs = [suite.make_run() for _ in range(3)]
    jobs = suite.target.submit_all(runs, max_parallel=2)
    _require([job.run.run_id for job in jobs] == [run.run_id for run in runs], "one job for each run, in order")
    for job in jobs:
        suite.finish(job, State.FINISHED, "every run of a queue is finished")


def _wait_for_step(run: RunFolder, step: int) -> None:
    _until(lambda: step in History.load(run.path).series("train/loss"), f"step {step} of run {run.run_id} arrives")


def _wait_for_attempt(run: RunFolder, attempt: int) -> None:
    _until(lambda: len(History.load(run.path).warm) >= attempt, f"attempt {attempt} of run {run.run_id} begins")


def _until(condition: Callable[[], bool], promise: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        _require(time.monotonic() < deadline, f"{promise}: not within {PATIENCE_SECONDS:g} s")
        time.sleep(0.05)


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(f"broken promise: {text}")
