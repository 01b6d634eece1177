"""Start and follow the trials of a stage, each once, even with several clients and after crashes.

A client takes a lock in the run's folder, ``study.lock``, before it looks at the run and starts it, and keeps it until
the run is over. The system releases the lock when the process dies. So one of two clients starts a trial, and the other
waits for its result, or takes over when the first has died. The run's own locks show whether a process works on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from filelock import FileLock

from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.errors import RunBusyError, RunFailedError, RunNotFoundError, SparseBPError, UnreachableError
from sparsebp_cli.plan import Plan, Provenance
from sparsebp_cli.recipe import with_stop
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.run.folder import is_shared
from sparsebp_cli.target.contract import Job
from sparsebp_cli.target.launch import Launch
from sparsebp_lab.study.place import TrialPlace, deal
from sparsebp_lab.study.store import TrialStore, has_plan
from sparsebp_lab.study.trial import StudyTrial

LOCK = "study"  # the role of the lock in a run's folder
# A client without other work waits this long for targets that do not answer. A remote runner contacts such a target at
# least once a minute, so it tolerates an interruption of some minutes.
PATIENCE_SECONDS = 600.0


class Status(StrEnum):
    """State of a trial as a study counts it."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    DIVERGED = "diverged"  # loss or gradient not finite: a result that a retry would not change
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"
    UNREACHABLE = "unreachable"  # its target has not answered for long; the run's state is unknown
    PAUSED = "paused"  # at a rung of halving, waiting for all others
    PRUNED = "pruned"  # at a rung of halving where others were better

    @property
    def over(self) -> bool:
        """Whether this command does nothing more for the trial."""
        return self not in {Status.WAITING, Status.RUNNING}


WITH_RESULT = (Status.FINISHED, Status.DIVERGED, Status.PAUSED, Status.PRUNED)  # no retry
STATUSES = {
    State.QUEUED: Status.WAITING,
    State.RUNNING: Status.RUNNING,
    State.UNREACHABLE: Status.RUNNING,
    State.FINISHED: Status.FINISHED,
    State.FAILED: Status.FAILED,
    State.INTERRUPTED: Status.INTERRUPTED,
    State.CANCELLED: Status.CANCELLED,
}


@dataclass
class TrialRun:
    """A trial, its run, and this client's work on it."""

    trial: StudyTrial
    run: RunFolder
    status: Status = Status.WAITING
    lock: FileLock | None = None  # from the claim to the end
    place: TrialPlace | None = None
    is_planned: bool = False  # whether the run's plan fixes the place
    state: State | None = None  # state of its run at the last look; None without a plan
    started: bool = False  # whether this client has started it
    was_alive: bool = False  # whether this client has seen it before its end
    problem: str = ""  # why it failed, or could not be started

    def claim(self) -> bool:
        """Take the trial's lock; return whether this client holds it."""
        if self.lock is None:
            self.run.path.mkdir(mode=0o777 if is_shared() else 0o700, parents=True, exist_ok=True)
            # Check first: taking a lock that another process holds would block.
            if not self.run.is_locked(LOCK):
                try:
                    self.lock = self.run.lock(LOCK)
                except RunBusyError:  # another client took it first
                    return False
        return self.lock is not None

    def release(self) -> None:
        """Give the lock back."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def look(self) -> Status:
        """Return the current state of the run."""
        if not has_plan(self.run):
            return Status.WAITING
        self.state = self.run.state()
        status = STATUSES[self.state]
        if status is Status.INTERRUPTED and self._has_stopped():
            return Status.PRUNED if self.trial.is_cut else Status.PAUSED
        return Status.DIVERGED if status is Status.FAILED and self._broke_down() else status

    def can_start(self) -> bool:
        """Return whether this client should start it now. The check whether a process works on the run comes before the
        state; otherwise a worker that just finished would be started again."""
        if self.lock is None or self.started or not _is_idle(self.run):
            return False
        status = self.look()
        return not status.over or not self.is_tried(status)

    def is_tried(self, status: Status) -> bool:
        """Return whether a finished run gets no further start. A failure in an earlier command, or an interruption from
        outside, is retried once."""
        if status in {*WITH_RESULT, Status.CANCELLED}:
            return True
        return self.started or (status is Status.FAILED and self.was_alive)

    def expect(self, trial: StudyTrial) -> None:
        """Replace the trial after a new plan: a tuning trial may become a report trial, and a paused one may go on."""
        self.trial = trial
        if self.status in {Status.PAUSED, Status.PRUNED} and self.look() is Status.INTERRUPTED:
            self.status, self.started, self.was_alive = Status.WAITING, False, False
        elif not self.status.over or self.status in {Status.PAUSED, Status.UNREACHABLE}:
            found = self.look()
            self.status = found if found in WITH_RESULT and found is not Status.DIVERGED else self.status

    def _has_stopped(self) -> bool:
        """Return whether the run has reached the step at which its trial stops."""
        ends = History.load(self.run.path).ends if self.trial.stop_at is not None else []
        return bool(ends) and ends[-1]["step"] >= (self.trial.stop_at or 0)

    def _broke_down(self) -> bool:
        try:
            return bool(load_folder(self.run).broke_down)
        except RunNotFoundError:
            return False


class Driver:
    """Run trials at places; a place gets its next trials when it has finished its current ones of this study."""

    def __init__(self, places: Sequence[TrialPlace], store: TrialStore, provenance: Provenance) -> None:
        self._places, self._store = places, store
        self.provenance: Provenance = provenance  # of plans made from now on
        self._deal = deal(places)
        self._is_stopping = False
        self._silent_since: float | None = None  # when all awaited places first stopped answering
        self.runs: dict[str, TrialRun] = {}

    def add(self, trials: Iterable[StudyTrial]) -> list[TrialRun]:
        """Return the entries of trials; entries of finished runs are over at once."""
        added = []
        for trial in trials:
            if trial.run_id not in self.runs:
                self.runs[trial.run_id] = TrialRun(trial, self._store.find(trial))
            entry = self.runs[trial.run_id]
            entry.expect(trial)
            added.append(entry)
        return added

    def drive(self, trials: Sequence[StudyTrial], pause: Callable[[], None]) -> None:
        """Run trials until all are over, or after :meth:`stop` until all have ended. ``pause`` waits a moment."""
        entries = self.add(trials)
        try:
            while True:
                for entry in entries:
                    self._observe(entry)
                waiting = [entry for entry in entries if not entry.status.over]
                if not waiting or (self._is_stopping and self._are_silent(self._live())):
                    return
                if not self._is_stopping:
                    self._start(waiting, entries)
                    self._give_up_silent(waiting)
                pause()
        finally:
            for entry in entries:
                entry.release()

    def stop(self) -> None:
        """Start no further trials, and ask the workers of this client's trials for a checkpoint and an end."""
        self._is_stopping = True
        live = sorted(self._live(), key=lambda entry: not entry.run.is_locked("worker"))  # working runs come first
        # Reversed, so that the first run of each runner, which works, remains in the mapping.
        watchers = {Launch.load(entry.run): entry for entry in reversed(live)}
        by_watcher = {launch.watcher_pid: entry for launch, entry in watchers.items() if launch is not None}
        for entry in by_watcher.values():  # a runner passes the request on to all its runs
            _job(entry.run).stop()

    def kill(self) -> None:
        """End the workers of this client's trials at once."""
        for entry in self._live():
            _job(entry.run).kill()

    def _live(self) -> list[TrialRun]:
        """Return the entries that this client holds and that a process works on or has queued."""
        held = [entry for entry in self.runs.values() if entry.lock is not None]
        return [entry for entry in held if entry.run.is_locked("worker") or entry.run.is_locked("target")]

    def _are_silent(self, entries: Iterable[TrialRun]) -> bool:
        """Return whether no place of these trials answers: some run is unreachable and none works. The other runs of
        the place wait for their turn."""
        states: dict[str, set[State | None]] = {}
        for entry in entries:
            if entry.place is None:  # another client assigns it
                return False
            states.setdefault(entry.place.key, set()).add(entry.state)
        return all(State.UNREACHABLE in found and State.RUNNING not in found for found in states.values())

    def _give_up_silent(self, waiting: Sequence[TrialRun]) -> None:
        """Stop waiting for places that have not answered for long, once nothing else remains. Their workers and their
        remote runner may continue; any later command finds the results."""
        if not self._are_silent(waiting):
            self._silent_since = None
            return
        self._silent_since = self._silent_since or time.monotonic()
        if time.monotonic() - self._silent_since > PATIENCE_SECONDS:
            problems = {entry.place: problem for entry in waiting if (problem := _find_warning(entry.run))}
            for entry in waiting:
                self._give_up([entry], problems.get(entry.place, ""), Status.UNREACHABLE)

    def _observe(self, entry: TrialRun) -> None:
        if entry.status.over:
            return
        is_mine = entry.claim()
        status = entry.look()
        if not status.over:
            entry.status, entry.was_alive = status, True
            if is_mine and has_plan(entry.run) and entry.run.state() is State.UNREACHABLE:
                _job(entry.run)  # a remote target without a remote runner: start the runner again
            return
        if entry.is_tried(status) or (not is_mine and status in WITH_RESULT):
            entry.status = status
            is_well = status in WITH_RESULT and status is not Status.DIVERGED
            entry.problem = "" if is_well else entry.problem or _describe_end(entry.run)
            entry.release()
        else:
            entry.status = Status.WAITING

    def _start(self, waiting: Sequence[TrialRun], entries: Sequence[TrialRun]) -> None:
        """Submit waiting trials to each place that has no work of this study."""
        free = [entry for entry in waiting if entry.can_start()]
        busy = {self._place_of(entry).key for entry in entries if not entry.status.over and not _is_idle(entry.run)}
        batches: dict[str, list[TrialRun]] = {}
        for entry in free:
            batches.setdefault(self._place_of(entry).key, []).append(entry)
        for key, batch in batches.items():
            if key not in busy:
                self._submit(batch)

    def _place_of(self, entry: TrialRun) -> TrialPlace:
        """Return where a trial runs: at its plan's place, else at the next place in turn. A plan's place that the study
        no longer names counts only while a process works on the run there."""
        if not entry.is_planned and has_plan(entry.run):
            section = Plan.load(entry.run.plan_file).recipe.target
            known = [place for place in self._places if place.put(entry.trial.recipe).target == section]
            if not known and not _is_idle(entry.run):
                entry.place = TrialPlace(section.kind, section)
                return entry.place
            entry.place, entry.is_planned = next(iter(known), None), True
        if entry.place is None:
            entry.place = next(self._deal)
        return entry.place

    def _submit(self, batch: Sequence[TrialRun]) -> None:
        """Write missing plans for trials of one place, and submit the trials, those of one target together."""
        targets: dict[str, list[TrialRun]] = {}
        for entry in batch:
            # A new plan could move it to another place while a worker continues where the lost plan sent it.
            if len(self._places) > 1 and not has_plan(entry.run) and _may_be_elsewhere(entry.run):
                self._give_up([entry], f"the plan cannot be read, so the target is unknown: {entry.run.plan_file}")
                continue
            if not has_plan(entry.run):
                recipe = self._place_of(entry).put(entry.trial.recipe)
                Plan(run_id=entry.trial.run_id, recipe=recipe, provenance=self.provenance).save(entry.run.path)
                entry.is_planned = True
            plan = Plan.load(entry.run.plan_file)
            # It may go on beyond its rung, and elsewhere if its place no longer belongs to the study.
            target = self._place_of(entry).put(entry.trial.recipe).target
            recipe = with_stop(plan.recipe, entry.trial.stop_at).model_copy(update={"target": target})
            if recipe != plan.recipe:
                plan.model_copy(update={"recipe": recipe}).save(entry.run.path)
            targets.setdefault(recipe.target.model_dump_json(), []).append(entry)
        for some in targets.values():
            self._submit_to_one(some)

    def _submit_to_one(self, batch: Sequence[TrialRun]) -> None:
        from sparsebp_cli.target import make_target

        try:
            target = make_target(Plan.load(batch[0].run.plan_file).recipe.target)
            target.submit_all([entry.run for entry in batch], max_parallel=self._place_of(batch[0]).slots)
        except RunBusyError:
            return  # another process works on one of them; the next look shows which
        except RunFailedError as error:
            self._give_up(batch[:1], str(error))  # the others are submitted again at the next look
        except UnreachableError as error:
            self._give_up(batch, str(error), Status.UNREACHABLE)
        except SparseBPError as error:
            self._give_up(batch, str(error))
        else:
            for entry in batch:
                entry.started = True

    def _give_up(self, batch: Sequence[TrialRun], problem: str, status: Status = Status.FAILED) -> None:
        for entry in batch:
            entry.status, entry.problem = status, problem
            entry.release()


def _is_idle(run: RunFolder) -> bool:
    """Return whether no process works on a run or has queued it."""
    return not (run.is_locked("worker") or run.is_locked("target")) and (
        not has_plan(run) or run.state() is not State.UNREACHABLE
    )


def _may_be_elsewhere(run: RunFolder) -> bool:
    """Return whether a worker of this run may be alive at a place that only its plan names."""
    launch = Launch.load(run)
    return launch is not None and launch.sight not in {"", "over"}


def _job(run: RunFolder) -> Job:
    from sparsebp_cli.target import make_target

    return make_target(Plan.load(run.plan_file).recipe.target).reattach(run)


def _find_warning(run: RunFolder) -> str:
    launch = Launch.load(run)
    return launch.warning if launch is not None else ""


def _describe_end(run: RunFolder) -> str:
    ends = History.load(run.path).ends
    return str(ends[-1]["text"]) if ends else ""
