"""``sparsebp archive``: pack runs into one file, which ``compare --from`` and ``show --from`` read."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import tell, warn
from sparsebp_cli.cli.answer.run_record import ArchiveFile
from sparsebp_cli.cli.option import Format, ManyRuns
from sparsebp_cli.cli.quantity import show_count
from sparsebp_cli.cli.screen import Output, print_line
from sparsebp_cli.cli.stored_run import find_all, find_studies, find_study
from sparsebp_cli.errors import RunBusyError, SparseBPError, UsageError
from sparsebp_cli.run import History, RunFolder

if TYPE_CHECKING:
    from sparsebp_cli.compare.archive import Member

THIN = "Of a study's tuning runs, store only the evaluations and FLOPs (an eighth of the bytes)."


def archive(
    runs: ManyRuns,
    file: Annotated[Path, typer.Option("--to", metavar="FILE", help="The archive to write: a .tar.gz file.")],
    thin: Annotated[bool, typer.Option("--thin", help=THIN)] = False,
    output: Format = Output.TABLE,
) -> None:
    """Pack runs into one file: recipes, event logs, tags, package versions and a report, without models.

    `compare --from FILE` and `show --from FILE` read the archive. `archive @STUDY` also packs its tuning runs, so
    that `study YAML --from FILE` can check the tuned values. If a run is active or damaged, nothing is written. An
    existing FILE is replaced only if it is an archive without other runs.
    """
    from sparsebp_cli.compare.archive import check_archive_path, refuse_loss, write_archive

    check_archive_path(file)
    folders = find_all(runs)
    for folder in folders:
        folder.read_plan()  # raises if the plan is damaged
        if not (state := folder.state()).over:
            raise RunBusyError(
                f"run {folder.run_id} is {state}: only runs that have ended can be archived; nothing was written"
            )
    studies = [record for word in runs if (record := find_study(word)) is not None]
    study = studies[0].study if len(studies) == len(runs) == 1 else ""  # if it is alone, the report is the study's
    command = f"sparsebp compare --from {shlex.quote(file.name)}"
    if study:
        command = f"sparsebp compare --study {study} --from {shlex.quote(file.name)}"
    if thin and not studies:
        raise UsageError("--thin needs a study: sparsebp archive @STUDY --thin --to FILE")
    thinned = frozenset[str]().union(*(record.find_thin() for record in studies)) if thin else frozenset[str]()
    ids = [folder.run_id for folder in folders]
    refuse_loss(file, ids)
    members = _make_members(folders, study, command, thinned)
    write_archive(file, itertools.chain((record.pack(thinned) for record in studies), members))
    tell(ArchiveFile(file=str(file), bytes=file.stat().st_size, runs=ids, next=[command]), output, _print)


def _print(found: ArchiveFile) -> None:
    count = "1 run" if len(found.runs) == 1 else f"{len(found.runs)} runs"
    print_line(f"{found.file}: {count}, {show_count(found.bytes, 'B')}")


def _make_members(folders: Sequence[RunFolder], study: str, command: str, thinned: Collection[str]) -> Iterator[Member]:
    from sparsebp_cli.compare.archive import list_members
    from sparsebp_cli.run.journal import FILE

    environments: dict[str, list[dict[str, object]]] = {}
    for folder in folders:
        history = History.load(folder.path)
        environments[folder.run_id] = history.environments
        if problem := history.describe_unreadable():
            warn(f"{folder.run_id}: {problem} by every command")
        for name, content in list_members(folder):
            is_thin = folder.run_id in thinned and name.endswith(f"/{FILE}")
            yield name, find_studies("--thin").thin_journal(content) if is_thin else content
    yield "environment.json", (json.dumps(environments, indent=1) + "\n").encode()
    if report := _make_report(folders, study, command):
        yield "report.html", report.encode()


def _make_report(folders: Sequence[RunFolder], study: str, command: str) -> str:
    """Return the report of the runs, for a study the report of its reported runs. If they cannot be compared, warn and
    return an empty text."""
    from sparsebp_cli.compare import REPORT_CURVES, Question, compare_runs
    from sparsebp_cli.compare.report import render_report

    try:
        if not study:
            return render_report(compare_runs(folders, Question(curves=REPORT_CURVES)), command)
        found = find_studies("a study").select(study)
        question = Question(curves=REPORT_CURVES, **found.terms)
        return render_report(compare_runs(found.runs, question), command)
    except SparseBPError as error:
        warn(f"the archive has no report: {error}")
        return ""
