"""``sparsebp sync``: send what the store and trackers lack."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from sparsebp_cli.cli.answer import tell, warn
from sparsebp_cli.cli.answer.result_record import SentRun, SentRuns
from sparsebp_cli.cli.completion import complete_run
from sparsebp_cli.cli.option import RUN_HELP, Format
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.cli.stored_run import find_all
from sparsebp_cli.errors import SparseBPError, TrackingError, UsageError
from sparsebp_cli.run import RunFolder, list_runs
from sparsebp_cli.tracker.contract import STORE, find_feeder

TO_HELP = (
    "Tracker to send to: mlflow, tensorboard, trackio or one of a plug-in. Can be repeated. Default: mlflow and "
    "tracking.also."
)


def sync(
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Send every run of this machine.")] = False,
    uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="Address of the MLflow server or database, instead of the one in the run's recipe or in "
            "MLFLOW_TRACKING_URI.",
        ),
    ] = None,
    to: Annotated[list[str] | None, typer.Option("--to", metavar="NAME", help=TO_HELP)] = None,
    output: Format = Output.TABLE,
) -> None:
    """Send missing numbers to MLflow and other trackers. Sending twice does no harm."""
    if bool(runs) == everything:
        raise UsageError("sync needs runs, or --all for every run")
    _check_trackers(to or [], uri)
    sent = []
    for folder in list_runs()[::-1] if everything else find_all(runs or []):
        for tracker in dict.fromkeys(to or [STORE, *_find_also(folder)]):
            sent.append(_send_to_store(folder, uri) if tracker == STORE else _send_to_tracker(folder, tracker))
            _print_sent(sent[-1])
    tell(SentRuns(runs=sent), output, lambda _: None)  # each was printed when it was sent
    if not all(one.is_complete for one in sent):
        raise typer.Exit(TrackingError.exit_code)


def _check_trackers(names: Sequence[str], uri: str | None) -> None:
    """Raise UsageError for a tracker that cannot be used here, or for an invalid address."""
    from sparsebp_cli.recipe.store_address import find_problem
    from sparsebp_cli.tracker import find_tracker

    for name in names:
        if name != STORE:
            find_tracker(name).require(name)
            find_feeder()
    if uri is not None and names and STORE not in names:
        raise UsageError(f"--uri is the address of an MLflow store: add --to {STORE}, got --to {' '.join(names)}")
    if uri is not None and (problem := find_problem(uri)):
        raise UsageError(f"--uri {problem}")


def _find_also(folder: RunFolder) -> list[str]:
    """Return the trackers that a run's recipe requests; none if its plan cannot be read (the store reports that)."""
    from sparsebp_cli.plan import Plan

    with suppress(SparseBPError):
        return Plan.load(folder.plan_file).recipe.tracking.also
    return []


def _send_to_store(folder: RunFolder, uri: str | None) -> SentRun:
    from sparsebp_cli.tracking import sync as send

    result = send(folder, uri)
    return SentRun(
        run_id=folder.run_id,
        name=folder.brief()[0],
        tracker=STORE,
        points_sent=result.points_sent,
        is_complete=result.complete,
        problem=result.problem,
        uri=result.uri,
        mlflow_run_id=result.mlflow_run_id,
        next=result.elsewhere(folder.run_id) if result.is_refused else "",
    )


def _send_to_tracker(folder: RunFolder, name: str) -> SentRun:
    door, problem = find_feeder().send_to(folder, name)
    return SentRun(
        run_id=folder.run_id,
        name=folder.brief()[0],
        tracker=name,
        points_sent=door.points_sent,
        is_complete=not problem,
        problem=problem,
        uri=door.place,
        mlflow_run_id="",
        next="",
    )


def _print_sent(run: SentRun) -> None:
    if run.is_complete:
        print_line(f"{run.run_id} {run.name}: {run.points_sent} points sent to {run.uri}")
    else:
        warn(f"{run.run_id}: {run.problem}{run.next and f'; {run.next}'}")
