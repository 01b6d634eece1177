"""``sparsebp leaderboard``: show the rules and tasks, and check submissions."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.answer.record import Checked
from sparsebp_cli.cli.exit_code import CHECK_FAILED
from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.screen import Output, console, make_table, print_line
from sparsebp_cli.errors import UsageError
from sparsebp_lab.answer.leaderboard_record import CellLine, RuleList, SubmissionReport, TaskLine

if TYPE_CHECKING:
    from sparsebp_cli.run import RunFolder
    from sparsebp_lab.leaderboard.cell import CellResult, TaskCell
    from sparsebp_lab.leaderboard.finding import RuleFinding
    from sparsebp_lab.leaderboard.rules import BoardRules
    from sparsebp_lab.leaderboard.submission import Submission

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
WHAT = "A folder with submission.yaml, or the name of a task."
AGAIN = (
    "If the submission breaks no rule, also train this many of its trials again, drawn at random, and compare the "
    "results."
)
RULES = "Folder with rules.yaml and the tasks' studies (default: the included ones)."


class LeaderboardAction(StrEnum):
    """Actions on the leaderboard."""

    CHECK = "check"


def leaderboard(
    action: Annotated[
        LeaderboardAction | None,
        typer.Argument(metavar="check", help="Check a submission, and name the rules that it breaks."),
    ] = None,
    what: Annotated[str | None, typer.Argument(metavar="FOLDER|TASK", help=WHAT, show_default=False)] = None,
    again: Annotated[int, typer.Option("--rerun", min=0, metavar="N", help=AGAIN)] = 0,
    rules: Annotated[Path | None, typer.Option(metavar="FOLDER", help=RULES)] = None,
    output: Format = Output.TABLE,
) -> None:
    """List the leaderboard's tasks and rules; `check FOLDER` checks a submission.

    A submission is a study of a task, with the archive of its trials. Exits with 1 if the submission breaks a rule.
    """
    from sparsebp_lab.leaderboard.rules import load_board

    board = load_board(rules)
    if action is None:
        if again:
            raise UsageError("--rerun needs 'check FOLDER', where FOLDER contains a submission")
        tell(_describe(board), output, _print_rules)
        return
    if what is None:
        raise UsageError("leaderboard check needs a folder with submission.yaml, or the name of a task")
    report = _check(_find(what, board), board, again)
    tell(report, output, _print_report)
    if not report.is_accepted:
        raise typer.Exit(CHECK_FAILED)


def _find(what: str, board: BoardRules) -> Submission:
    from sparsebp_lab.leaderboard.submission import own_task, read_submission

    return read_submission(Path(what)) if Path(what).is_dir() else own_task(board, what)


def _describe(board: BoardRules) -> RuleList:
    from sparsebp_lab.leaderboard.submission import own_task
    from sparsebp_lab.study.loader import read_arms

    tasks = []
    for name in board.rules.tasks:
        own = own_task(board, name)
        arms = read_arms(own.study)
        controls = [arm for arm in arms if arm in board.rules.controls]
        methods = [arm for arm in arms if arm not in controls]
        has_archive = own.archive.exists()
        tasks.append(
            TaskLine(name=name, study=str(own.study), methods=methods, controls=controls, has_archive=has_archive)
        )
    rules = board.rules
    return RuleList(
        version=rules.version,
        tune_seeds=rules.seeds.tune,
        report_seeds=rules.seeds.report,
        may_change=rules.may_change,
        tasks=tasks,
    )


def _print_rules(found: RuleList) -> None:
    table = make_table("task", "methods", "controls", "trained", title=f"Leaderboard, version {found.version}")
    for task in found.tasks:
        table.add_row(task.name, ", ".join(task.methods), ", ".join(task.controls), "yes" if task.has_archive else "no")
    console().print(table)
    print_line(
        f"seeds: tune {found.tune_seeds}, report {found.report_seeds}; "
        f"a method may change {', '.join(found.may_change)}"
    )
    print_line(f"studies: {Path(found.tasks[0].study).parent if found.tasks else 'none'}")
    print_line("next: sparsebp leaderboard check FOLDER")


def _check(submission: Submission, board: BoardRules, number: int) -> SubmissionReport:
    """Check a submission against the rules, and train cells of it again if requested."""
    from sparsebp_lab.leaderboard.check import check_submission

    findings = check_submission(submission, board)
    # Do not run anything from a study that breaks a rule.
    kept = all(finding.level != "fail" for finding in findings)
    results: list[tuple[str, CellResult]] = _train_again(submission, number) if number and kept else []
    findings += [_of_cell(result) for _, result in results]
    levels = {finding.level for finding in findings}
    fresh = f"sparsebp leaderboard check {shlex.quote(str(submission.study.parent))} --rerun 2"
    return SubmissionReport(
        task=submission.task,
        study=str(submission.study),
        archive=str(submission.archive),
        methods=list(submission.methods),
        is_accepted="fail" not in levels,
        checks=[Checked(**finding._asdict()) for finding in findings],
        cells=[_make_line(run_id, result) for run_id, result in results],
        next=[fresh] if "fail" not in levels and not number and submission.about is not None else [],
    )


def _of_cell(result: CellResult) -> RuleFinding:
    from sparsebp_lab.leaderboard.finding import FAIL, OK, RuleFinding

    return RuleFinding(OK if result.is_equal else FAIL, "trained again", result.describe())


def _make_line(run_id: str, result: CellResult) -> CellLine:
    return CellLine(
        run_id=run_id,
        arm=result.arm,
        combination=result.combination,
        seed=result.seed,
        metric=result.metric,
        archived=result.archived,
        again=result.again,
        tolerance=result.tolerance,
        is_equal=result.is_equal,
    )


def _train_again(submission: Submission, number: int) -> list[tuple[str, CellResult]]:
    """Train cells of the archive again, one after the other, and return each with its archived result."""
    from sparsebp_cli.compare.archive import open_archive
    from sparsebp_cli.compare.load import load_folder
    from sparsebp_lab.leaderboard.cell import compare_cell, draw_cells
    from sparsebp_lab.leaderboard.check import read_runs
    from sparsebp_lab.study.loader import load_study
    from sparsebp_lab.study.record import find_archived

    mine, archive = load_study(submission.study), open_archive(submission.archive)
    record = find_archived(mine.study.study, archive)
    runs = read_runs(record, archive)
    cells = draw_cells(mine, record, archive, runs, number)
    folders = _run(cells, submission.study)
    return [
        (folder.run_id, compare_cell(cell, load_folder(folder), runs))
        for cell, folder in zip(cells, folders, strict=True)
    ]


def _run(cells: Sequence[TaskCell], file: Path) -> list[RunFolder]:
    """Train each cell under a new id; raise typer.Exit after a signal."""
    from sparsebp_cli.cli.follow import follow_all
    from sparsebp_cli.cli.stored_run import check_plans, submit_all
    from sparsebp_cli.plan import Plan, find_provenance
    from sparsebp_cli.run import create_run

    plans = [Plan(recipe=cell.recipe, provenance=find_provenance(file)) for cell in cells]
    check_plans(plans)
    with Interrupts() as interrupts:
        folders = [create_run(plan.run_id) for plan in plans]
        for plan, folder in zip(plans, folders, strict=True):
            plan.save(folder.path)
        follow_all(submit_all(folders), interrupts, is_brief=True)
        if interrupts.received:
            raise typer.Exit(interrupts.exit_code)
    return folders


def _print_report(report: SubmissionReport) -> None:
    from rich.text import Text

    table = make_table("", "rule", "found", title=f"Leaderboard, task {report.task}")
    for one in report.checks:
        text = one.text + (f"\n-> {one.hint}" if one.hint else "")
        table.add_row(Text(one.level, style=STYLES[one.level]), one.what, Text(text))
    console().print(table)
    print_line("accepted: every rule is kept" if report.is_accepted else "not accepted: a rule is not kept")
    for line in report.next:
        print_line(f"next: {line}")
