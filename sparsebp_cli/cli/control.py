"""``sparsebp resume``, ``cancel`` and ``logs``: continue, stop or watch a run that was submitted before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.answer.run_record import RunLog
from sparsebp_cli.cli.exit_code import NOT_FINISHED
from sparsebp_cli.cli.follow import describe_end, follow_all, make_outcome, make_outcomes, print_end, watch
from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.cli.option import Detach, Format, ManyRuns, OneRun
from sparsebp_cli.cli.runs import describe_run
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.cli.stored_run import ask_target, check_trainable, find_all, find_one, reattach, submit_all
from sparsebp_cli.errors import RunBusyError, UsageError
from sparsebp_cli.run import History, JournalWriter, RunFolder, State
from sparsebp_cli.run.budget import size_of


def resume(
    runs: ManyRuns,
    detach: Detach = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="Continue although FIELD has changed since the run began. FIELD is `code`, `data`, or a key or "
            "section of the recipe, such as training.seed. Can be repeated.",
        ),
    ] = None,
    cancelled: Annotated[bool, typer.Option("--cancelled", help="Continue cancelled runs too.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Continue runs from their last valid checkpoints, under the same ids.

    If recipe, code or data have changed since the checkpoint, a table shows the changes and the run does not start.
    """
    folders = find_all(runs)
    for folder in folders:
        if folder.state() is State.FINISHED:
            print_line(f"{folder.run_id} is finished already")
    before = [make_outcome(folder) for folder in folders if folder.state() is State.FINISHED]
    folders = [folder for folder in folders if folder.state() is not State.FINISHED]
    if not cancelled:
        _refuse_cancelled(folders)
    if not folders:
        tell(make_outcomes(before), output, lambda _: None)
        return
    check_trainable(folders)
    for folder in folders:
        _pass_stop(folder)
        if allow_change:
            _allow(folder, allow_change)
    seen = [size_of(folder.path / "journal.jsonl") for folder in folders]
    with Interrupts() as interrupts:
        jobs = submit_all(folders)
        if detach:
            for job in jobs:
                print_line(job.run.run_id)
            # For a run that is over, or whose target does not answer, print the same as without --detach.
            codes = [print_end(job) if job.status() not in {State.QUEUED, State.RUNNING} else 0 for job in jobs]
            started = [make_outcome(job.run, code) for job, code in zip(jobs, codes, strict=True)]
            tell(make_outcomes([*before, *started]), output, lambda _: None)
            raise typer.Exit(next((code for code in codes if code), 0))
        followed = follow_all(jobs, interrupts, seen=seen)
    tell(make_outcomes([*before, *followed.answer().runs]), output, lambda _: None)  # each was printed when it was over
    raise typer.Exit(followed.exit_code)


def _refuse_cancelled(folders: Sequence[RunFolder]) -> None:
    """Raise ``UsageError`` if a run was cancelled. All runs are checked before any is started."""
    names = [folder.run_id for folder in folders if folder.state() is State.CANCELLED]
    if names:
        shown, word = " ".join(names), "were" if len(names) > 1 else "was"
        raise UsageError(
            f"{shown} {word} cancelled; `sparsebp resume {shown} --cancelled` also continues cancelled runs"
        )


def _pass_stop(folder: RunFolder) -> None:
    """Let a run that stopped at ``checkpoint.stop_at`` continue to its end."""
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.recipe import with_stop

    plan, ends = Plan.load(folder.plan_file), History.load(folder.path).ends
    stop_at = plan.recipe.checkpoint.stop_at
    if stop_at is not None and folder.state() is State.INTERRUPTED and ends and ends[-1]["step"] >= stop_at:
        with folder.lock("target"):
            plan.model_copy(update={"recipe": with_stop(plan.recipe, None)}).save(folder.path)
        print_line(f"{folder.run_id} continues after checkpoint.stop_at {stop_at}, to its last step")


def _allow(folder: RunFolder, fields: Sequence[str]) -> None:
    """Write the changes that the next attempt accepts into the event log, which is sent to its target with the run."""
    if not folder.state().over:
        raise RunBusyError(f"run {folder.run_id} is {folder.state()}: --allow-change needs a run that has ended")
    with folder.lock("target"), JournalWriter(folder.path) as journal:
        # this is not an attempt: nothing is trained
        journal.attempt = max(journal.attempt - 1, 1)
        journal.write("allow", fields=list(fields))


def cancel(
    runs: ManyRuns,
    grace: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="Seconds in which the run can write a last checkpoint before it is killed."
        ),
    ] = 30.0,
    output: Format = Output.TABLE,
) -> None:
    """Stop runs, after each has written a last checkpoint. Runs that have ended do not change."""
    stopped = []
    for folder in reversed(find_all(runs)):  # stop the last first, so that a queue starts none in between
        ask_target(folder)
        before = folder.state()
        state = before if before.over else reattach(folder).cancel(grace)
        text = f"is {before} already" if before.over else str(state)
        if not state.over:
            text = f"is {state}: its target does not answer; the run stops when the target answers again"
        print_line(f"{folder.run_id} {text}")
        stopped.append(make_outcome(folder, 0 if state.over else NOT_FINISHED, text=text))
    tell(make_outcomes(stopped[::-1]), output, lambda _: None)  # each was printed when it had stopped
    raise typer.Exit(max(outcome.exit_code for outcome in stopped))


def logs(
    run: OneRun,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Show a run's progress and what it printed. Ctrl-C does not stop the run."""
    job = reattach(find_one(run))
    code = watch(job, follow=follow)
    found = RunLog(run=describe_run(job.run), lines=list(job.logs()), text=describe_end(job))
    tell(found, output, lambda _: None)  # each line was printed when it arrived
    raise typer.Exit(code)
