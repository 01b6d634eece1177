"""Follow submitted runs by their event logs until they are over or the user interrupts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsebp_cli.cli.answer import FieldChange
from sparsebp_cli.cli.answer.run_record import RunOutcome, RunOutcomes
from sparsebp_cli.cli.display import Display, PlainDisplay, make_display
from sparsebp_cli.cli.exit_code import NOT_FINISHED
from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.cli.progress import Progress
from sparsebp_cli.cli.runs import describe_run
from sparsebp_cli.cli.screen import console, make_table, print_line
from sparsebp_cli.errors import DivergedError, UsageError
from sparsebp_cli.run import History, RunFolder, State, read

if TYPE_CHECKING:
    from sparsebp_cli.target import Job

POLL_SECONDS = 0.2
EXIT_CODES = {State.FINISHED: 0, State.FAILED: 100, State.CANCELLED: 103}
FAILED_WITH = {3: DivergedError.exit_code}  # the worker's exit code to this command's
WAITING_FOR = {
    State.RUNNING: "",
    State.QUEUED: "waiting for its turn",
    State.UNREACHABLE: "the target does not answer; still trying to reach it",
}
STOPPING = "stopping after this step, with a checkpoint; Ctrl-C again ends the run at once"
KILLING = "ending the run at once"


@dataclass(frozen=True)
class Followed:
    """The outcome of followed runs."""

    runs: tuple[RunFolder, ...]
    codes: tuple[int, ...]  # for each run followed to its end: its contribution to the exit code
    exit_code: int  # that of the first run that did not finish; 130 or 143 after a signal

    def answer(self) -> RunOutcomes:
        """Return the outcome of each run."""
        codes = (*self.codes, *(NOT_FINISHED for _ in self.runs[len(self.codes) :]))
        return make_outcomes([make_outcome(run, code) for run, code in zip(self.runs, codes, strict=True)])


def make_outcome(run: RunFolder, exit_code: int = 0, text: str | None = None) -> RunOutcome:
    """Return the outcome of a run. ``text`` replaces the run's own description of its end."""
    ends = History.load(run.path).ends
    line = describe_run(run)
    own = str(ends[-1]["text"] or "") if ends and run.state().over else ""
    return RunOutcome(
        run=line,
        exit_code=exit_code,
        text=own if text is None else text,
        log_file=str(run.log_file),
        changes=[FieldChange(field=field, then=then, now=now) for field, then, now in _find_changes(run)],
    )


def make_outcomes(outcomes: Sequence[RunOutcome]) -> RunOutcomes:
    """Return outcomes with the commands for the next steps."""
    states = {outcome.run.run_id: outcome.run.state for outcome in outcomes}
    finished = [run_id for run_id, state in states.items() if state == State.FINISHED]
    stopped = [run_id for run_id, state in states.items() if state in {State.INTERRUPTED, State.FAILED}]
    alive = [run_id for run_id, state in states.items() if state in {State.QUEUED, State.RUNNING}]
    following = [f"sparsebp logs {run_id} --follow" for run_id in alive]
    following += [f"sparsebp resume {' '.join(stopped)}"] if stopped else []
    if finished:
        following.append(f"sparsebp {'compare' if len(finished) > 1 else 'show'} {' '.join(finished)}")
    return RunOutcomes(runs=list(outcomes), next=following)


def follow_all(
    jobs: Sequence[Job], interrupts: Interrupts, *, seen: Sequence[int] = (), is_brief: bool = False
) -> Followed:
    """Show the runs of jobs in order, each with a summary. Forward Ctrl-C and SIGTERM to the worker. ``interrupts`` is
    the context in which the jobs were submitted, so that no signal is lost in between. ``seen`` is the number of bytes
    of each event log that belong to earlier attempts; empty if all logs are new. ``is_brief`` omits the summaries of
    finished runs, which ``show`` has."""
    codes: list[int] = []
    runs = tuple(job.run for job in jobs)
    for number, job in enumerate(jobs):
        _follow(job, interrupts, seen[number] if seen else 0)
        codes.append(print_end(job, together=runs if number == len(jobs) - 1 else (), is_brief=is_brief))
        if interrupts.received:
            _print_not_started(jobs[number + 1 :])
            return Followed(runs, tuple(codes), interrupts.exit_code)
    return Followed(runs, tuple(codes), next((code for code in codes if code), 0))


def watch(job: Job, *, follow: bool) -> int:
    """Show a run that another command submitted, up to now or with ``follow`` until it is over. Ctrl-C leaves it
    running. Return 0; 130 or 143 after a signal."""
    progress = begin_progress(job.run)
    with Interrupts() as interrupts, make_display(progress) if follow else PlainDisplay(progress) as display:
        offset, lines = 0, 0
        while True:
            over = job.status().over
            offset = _show_new(job, display, offset)
            printed = list(job.logs())
            for line in printed[lines:]:
                display.print_text(line)
            lines = len(printed)
            display.refresh()
            if over or not follow or interrupts.received:
                break
            interrupts.wait(POLL_SECONDS)
    if interrupts.received and not over:
        print_line(f"the run goes on; `sparsebp cancel {job.run.run_id}` stops it", stderr=True)
        return interrupts.exit_code
    print_line(f"{job.run.run_id}: {describe_end(job)}")
    return 0


def begin_progress(run: RunFolder) -> Progress:
    """Return the progress of a run before the first record of its event log."""
    recipe = run.read_plan()["recipe"]
    return Progress(recipe["name"], run.run_id, recipe["training"]["max_steps"])


def describe_end(job: Job) -> str:
    """Return the state of a run, and the reason for its end if the event log has one, in one line."""
    ends = History.load(job.run.path).ends
    text = ends[-1]["text"] if ends and job.status().over else ""
    return f"{job.status()}: {text}" if text else str(job.status())


def _follow(job: Job, interrupts: Interrupts, seen: int) -> None:
    progress = begin_progress(job.run)
    for record, offset in read(job.run.path):
        if offset <= seen:
            progress.add(record)
    with make_display(progress) as display:
        offset, handled, lost = seen, 0, False
        # After a signal do not wait for the last upload: the local runner finishes it by itself.
        while not (job.status().over if interrupts.received else job.settled()):
            offset = _show_new(job, display, offset)
            for _ in interrupts.received[handled:]:
                job.stop() if handled == 0 else job.kill()
                display.print_text(STOPPING if handled == 0 else KILLING)
                handled += 1
            lost = _report_connection(job, display, lost)
            display.refresh(WAITING_FOR.get(job.status(), "sending the last numbers to MLflow"))
            interrupts.wait(POLL_SECONDS)
        _show_new(job, display, offset)


def _show_new(job: Job, display: Display, offset: int) -> int:
    end = offset
    for record, after in read(job.run.path, offset):
        display.add(record)
        end = after
    return end


def _report_connection(job: Job, display: Display, lost: bool) -> bool:
    """Print once when a target stops answering and when it answers again. Return whether it is lost."""
    is_lost = job.status() is State.UNREACHABLE
    if is_lost and not lost:
        display.print_text(
            f"warning: {job.warning() or 'the target does not answer'}; the run may continue there; still trying to "
            "reach it"
        )
    if lost and not is_lost:
        display.print_text("the target answers again")
    return is_lost


def print_end(job: Job, *, together: Sequence[RunFolder] = (), is_brief: bool = False) -> int:
    """Print the summary of a finished run unless ``is_brief``, or how else it ended, and return the exit code. For
    ``together`` see :func:`~sparsebp_cli.cli.summary.summarise`."""
    from sparsebp_cli.cli.summary import summarise

    state = job.status()
    if job.run.is_gone():
        print_line(f"error: run {job.run.run_id}: {job.run.describe_move()}", stderr=True)
        return NOT_FINISHED
    if job.warning():
        print_line(f"warning: {job.warning()}", stderr=True)
    if state is State.FINISHED and is_brief:
        return 0
    if state is State.FINISHED:
        console().print(summarise(job.run, History.load(job.run.path), together=together, warning=job.warning()))
        return 0
    print_line(f"error: run {job.run.run_id} {describe_end(job)}", stderr=True)
    if state is State.INTERRUPTED:
        print_line(f"`sparsebp resume {job.run.run_id}` continues from the last checkpoint", stderr=True)
    elif changes := _find_changes(job.run):
        print_changes(changes)
        return UsageError.exit_code
    elif state is State.FAILED:
        print_line(f"the output of its worker is in {job.run.log_file}", stderr=True)
        return FAILED_WITH.get(job.exit_code() or 0, EXIT_CODES[state])
    return EXIT_CODES.get(state, NOT_FINISHED)


def print_changes(changes: Sequence[Sequence[str]]) -> None:
    """Print the changes that were refused: field, then, now."""
    from rich.text import Text

    table = make_table("field", "then", "now")
    for change in changes:
        table.add_row(*(Text(value) for value in change))
    console(stderr=True).print(table)


def _find_changes(run: RunFolder) -> list[list[str]]:
    """Return the changes for which a resume was refused: field, then, now."""
    ends = History.load(run.path).ends
    found = ends[-1].get("changes") if ends else None
    return [[str(value) for value in change] for change in found] if isinstance(found, list) else []


def _print_not_started(jobs: Sequence[Job]) -> None:
    if waiting := [job for job in jobs if not History.load(job.run.path).environments]:
        names = " ".join(job.run.run_id for job in waiting)
        print_line(f"not started: {names}; `sparsebp resume {names}` starts them", stderr=True)
