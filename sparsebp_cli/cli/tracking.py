"""``sparsebp sync``: send what the store lacks."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsebp_cli.cli.answer import tell, warn
from sparsebp_cli.cli.answer.result_record import SentRun, SentRuns
from sparsebp_cli.cli.completion import complete_run
from sparsebp_cli.cli.option import RUN_HELP, Format
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.cli.stored_run import find_all
from sparsebp_cli.errors import TrackingError, UsageError
from sparsebp_cli.run import RunFolder, list_runs


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
    output: Format = Output.TABLE,
) -> None:
    """Send to MLflow the numbers that it lacks. Sends nothing twice."""
    from sparsebp_cli.recipe.store_address import find_problem

    if bool(runs) == everything:
        raise UsageError("sync needs runs, or --all for every run")
    if uri is not None and (problem := find_problem(uri)):
        raise UsageError(f"--uri {problem}")
    sent = []
    for folder in list_runs()[::-1] if everything else find_all(runs or []):
        sent.append(_send(folder, uri))
        _print_sent(sent[-1])
    tell(SentRuns(runs=sent), output, lambda _: None)  # each was printed when it was sent
    if not all(one.is_complete for one in sent):
        raise typer.Exit(TrackingError.exit_code)


def _send(folder: RunFolder, uri: str | None) -> SentRun:
    from sparsebp_cli.tracking import sync as send

    result = send(folder, uri)
    return SentRun(
        run_id=folder.run_id,
        name=folder.brief()[0],
        tracker="mlflow",
        points_sent=result.points_sent,
        is_complete=result.complete,
        problem=result.problem,
        uri=result.uri,
        mlflow_run_id=result.mlflow_run_id,
        next=result.elsewhere(folder.run_id) if result.is_refused else "",
    )


def _print_sent(run: SentRun) -> None:
    if run.is_complete:
        print_line(f"{run.run_id} {run.name}: {run.points_sent} points sent to {run.uri}")
    else:
        warn(f"{run.run_id}: {run.problem}{run.next and f'; {run.next}'}")
