"""``sparsebp compare``: compare runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.completion import complete_metric, complete_run, complete_study
from sparsebp_cli.cli.exit_code import CHECK_FAILED
from sparsebp_cli.cli.screen import console, print_line, print_screenful
from sparsebp_cli.cli.stored_run import find_studies, find_study
from sparsebp_cli.errors import RunFailedError, UsageError
from sparsebp_cli.run import RunFolder, State
from sparsebp_cli.run.visible import mask

if TYPE_CHECKING:
    from sparsebp_cli.compare import Comparison, LoadedRun, Question
    from sparsebp_cli.compare.grid import Grid


class ComparisonFormat(StrEnum):
    """Output formats of a comparison."""

    TABLE = "table"
    JSON = "json"
    MD = "md"


class Direction(StrEnum):
    """The better direction of a metric."""

    LOWER = "lower"
    HIGHER = "higher"


RUNS = (
    "Runs: ids, beginnings of ids, names, folders, @last, @N (the newest N runs), @TAG, @STUDY, or NAME=VALUE for a "
    "tag with a value. Default: the runs that --where selects."
)
WHERE = "Compare only runs that meet this condition: 'policy=topk and keep<0.2'."
STUDY = "Compare this study's report runs and controls. With --all or --html, also show how it chose values."
FROM = "Read runs from here: a folder of runs, or an archive."
MARGIN = "How much worse than the baseline a group may be to count as not worse, such as eval/loss=0.01."
BETTER = "Whether lower or higher values of --metric are better. Needed only for a metric that SparseBP does not know."
FAIL_IF = "Exit with 1 if this holds for a group of equal runs (any seed), such as 'eval/loss.delta.high > 0.02'."
REST = "more: --all (every table), --html FILE (a page), `show RUN` (one run)"
SHOW, GATE, FILE = "What is shown", "For CI", "Files"


def compare(  # noqa: PLR0913, PLR0917 - one parameter an option
    runs: Annotated[list[str] | None, typer.Argument(metavar="RUN", help=RUNS, autocompletion=complete_run)] = None,
    where: Annotated[str | None, typer.Option(metavar="CONDITION", help=WHERE)] = None,
    study: Annotated[str | None, typer.Option(metavar="NAME", help=STUDY, autocompletion=complete_study)] = None,
    place: Annotated[str | None, typer.Option("--from", metavar="PLACE", help=FROM)] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC",
            help="The metric that measures quality.",
            show_default="eval/loss",
            autocompletion=complete_metric,
        ),
    ] = None,
    better: Annotated[Direction | None, typer.Option(help=BETTER)] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="The run to compare the others with.",
            show_default="a dense run, else a run with an exact policy",
            autocompletion=complete_run,
        ),
    ] = None,
    margin: Annotated[
        str | None, typer.Option(metavar="METRIC=VALUE", help=MARGIN, autocompletion=complete_metric)
    ] = None,
    output: Annotated[
        ComparisonFormat, typer.Option("-o", "--output", help="Format of the comparison.", rich_help_panel=SHOW)
    ] = ComparisonFormat.TABLE,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every table, with an explanation of its columns.", rich_help_panel=SHOW)
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the comparison as one HTML page.", rich_help_panel=FILE),
    ] = None,
    fail_if: Annotated[
        list[str] | None, typer.Option("--fail-if", metavar="CONDITION", help=FAIL_IF, rich_help_panel=GATE)
    ] = None,
) -> None:
    """Compare runs: quality, step time, cost and memory."""
    from sparsebp_cli.compare import check, compare_runs, find_outcomes, write_report

    question = replace(
        _question(metric, baseline, margin, whole=html is not None),
        better=better.value if better else "",
    )
    found: Any = None
    if study is None and runs and len(runs) == 1 and _names_study(runs[0], place):
        study, runs = runs[0].removeprefix("@"), None
    if study is None:
        chosen, left_out = find_runs(runs or [], where, place)
    else:
        found = _select_study(study, runs, where, place)
        chosen, left_out = list(found.runs), list(found.warnings)
        question = replace(question, **found.terms)
    comparison = compare_runs(chosen, question)
    comparison = replace(comparison, warnings=(*left_out, *comparison.warnings))
    if where is not None and (outcomes := find_outcomes(where)):
        warning = f"--where selects runs by outcome ({', '.join(outcomes)}), which biases all numbers shown here"
        comparison = replace(comparison, warnings=(warning, *comparison.warnings))
    # Do everything that can raise an error before printing anything.
    failures = [failure for condition in fail_if or [] for failure in check(comparison, condition)]
    is_whole = html is not None or everything or output is ComparisonFormat.MD
    more: Sequence[Grid] = find_studies("--study").make_grids(found, comparison) if found and is_whole else ()
    if html is not None:
        write_report(comparison, html, shlex.join(["sparsebp", *sys.argv[1:]]), more)
    _print(comparison, output, more, everything=everything)
    if html is not None:
        print_line(f"report: {html}", stderr=True)
    for failure in failures:
        print_line(f"failed: {failure.text}", stderr=True)
    lost = find_lost(comparison)
    for label in lost:
        print_line(f"failed: {label}: no run of this group finished, so it was not compared", stderr=True)
    if failures:
        raise typer.Exit(CHECK_FAILED)
    if lost:
        raise typer.Exit(RunFailedError.exit_code)


ALIVE = {State.QUEUED, State.RUNNING, State.UNREACHABLE}


def find_lost(comparison: Comparison) -> list[str]:
    """Return the labels of groups in which no run counts and none can still finish."""
    counted = {run.group for run in comparison.runs if run.counts}
    return [
        group.label
        for group in comparison.groups
        if group.group not in counted and not any(state in ALIVE for state in group.states)
    ]


def find_runs(words: list[str], where: str | None, place: str | None) -> tuple[list[LoadedRun], list[str]]:
    """Read the chosen runs from ``place``, or from this machine. Return the runs, and a warning for each run that
    cannot be read and for each name of which some seeds were not chosen. Raise ``UsageError`` if nothing chooses any
    run."""
    from sparsebp_cli.compare import choose, describe_left_out, load_all, local_candidates
    from sparsebp_cli.run import home

    if not words and where is None and place is None:
        raise UsageError("name the runs to compare, or select runs by --where; `sparsebp runs` lists all runs")
    found = local_candidates(None if place is None else find_folder(place))
    if not found and place is not None:
        raise UsageError(f"--from {place} contains no runs")
    chosen = choose(found, words, where, place or str(home()))
    loaded, unreadable = load_all(chosen)
    return loaded, [*unreadable, *describe_left_out(found, chosen)]


def find_folder(place: str) -> Path:
    """Return the folder of runs that ``--from`` names. An archive is unpacked for the lifetime of this process. Raise
    ``UsageError`` for anything else."""
    path = Path(place).expanduser()
    if path.is_file():
        from sparsebp_cli.compare.archive import open_archive

        return open_archive(path)
    if not path.is_dir():
        cure = "; runs cannot be read from MLflow: write an archive with `sparsebp archive` on the machine of the runs"
        cure = cure if "://" in place else ""
        raise UsageError(f"--from must be a folder of runs or an archive, got {mask(place)!r}{cure}")
    return path


def find_one_in(place: str, word: str) -> RunFolder:
    """Return the run that a word names in a folder of runs or in an archive; the newest if a name has several."""
    from sparsebp_cli.compare import choose, local_candidates

    return choose(local_candidates(find_folder(place)), [word], None, place)[-1].folder


def _select_study(study: str, runs: list[str] | None, where: str | None, place: str | None) -> Any:
    """Read the runs of a study from ``place``, or from this machine. Raise ``UsageError`` if something else selects
    runs, too."""
    if runs or where is not None:
        raise UsageError("--study selects the runs: leave out names and --where")
    return find_studies("--study").select(study, None if place is None else find_folder(place))


def _names_study(word: str, place: str | None) -> bool:
    """Return whether ``@WORD`` is a study of this machine, or of the archive that ``--from`` names."""
    return word.startswith("@") and find_study(word, None if place is None else find_folder(place)) is not None


def _question(
    metric: str | None,
    baseline: str | None,
    margin: str | None,
    *,
    whole: bool,
) -> Question:
    from sparsebp_cli.compare import REPORT_CURVES, Question, parse_margin

    named, allowed = parse_margin(margin) if margin is not None else (None, None)
    if named and metric and named != metric:
        raise UsageError(f"--margin names {named}, but --metric is {metric}: give both the same metric")
    return Question(baseline, metric or named, allowed, REPORT_CURVES if whole else ())


def _print(comparison: Comparison, output: ComparisonFormat, more: Sequence[Grid], *, everything: bool) -> None:
    from sparsebp_cli.compare import answer, render, table

    def show(found: Comparison) -> None:
        if output is not ComparisonFormat.TABLE:
            print_line(render(found, output.value, more).rstrip("\n"))
        elif everything:
            # keep commands whole, for copying
            console().print(*table(found, more), sep="\n", crop=False)
        else:
            notes = [f"warning: {text}" for text in found.warnings]
            notes += [f"left out: {run.run_id} ({run.label}): {run.reason}" for run in found.runs if not run.counts]
            if any(control.command for control in found.controls):
                notes.append("control runs are missing: --all shows the commands that train them")
            print_screenful(answer(found), notes, REST)

    tell(comparison, output, show)
