"""``sparsebp runs``: list the runs of this machine, or those that meet a condition, with chosen order and columns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebp_cli.cli.answer import tell
from sparsebp_cli.cli.answer.run_record import RunLine, RunList
from sparsebp_cli.cli.completion import complete_study
from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.cli.option import Format
from sparsebp_cli.cli.quantity import show_age
from sparsebp_cli.cli.screen import Output, console, make_table, print_line
from sparsebp_cli.cli.stored_run import find_studies
from sparsebp_cli.errors import RunNotFoundError, UsageError
from sparsebp_cli.run import RunFolder, home, list_runs
from sparsebp_cli.run.journal import describe_unreadable, find_outline
from sparsebp_cli.run.label import Labels

if TYPE_CHECKING:
    from rich.text import Text

    from sparsebp_cli.compare import RunCandidate

STYLES = {"finished": "green", "failed": "red", "running": "cyan", "interrupted": "yellow"}

WATCH_SECONDS = 1.0

WHERE = "Show only runs that meet this condition, such as 'policy=topk and eval/loss<3', or 'state!=finished'."
SORT = (
    "Sort by a column, such as eval/loss for the lowest first, or -eval/loss for the highest. Runs without a value "
    "come last."
)
COLUMNS = (
    "Columns to show: names of columns, recipe keys, metrics or tag.NAME. Example: "
    "run,seed,training.learning_rate,eval/loss."
)

# Map the heading of a column to its value.
COLUMN: dict[str, Callable[[RunLine], object]] = {
    "run": lambda line: line.run_id,
    "name": lambda line: line.name,
    "policy": lambda line: line.policy,
    "seed": lambda line: line.seed,
    "state": lambda line: line.state,
    "step": lambda line: line.step,
    "eval/loss": lambda line: line.eval_loss,
    "age": lambda line: time.time() - line.created,
    "tags": lambda line: ", ".join(line.tags) or None,
    "note": lambda line: line.note or None,
    "folder": lambda line: line.folder,
}
USUAL = ("run", "name", "policy", "seed", "state", "step", "eval/loss", "age")
OF_STUDY = ("arm", "combination", "role")
USUAL_OF_STUDY = ("run", *OF_STUDY, "seed", "state", "step", "eval/loss", "age")
WHOLE = {"run", "state", "seed", "step", "eval/loss"}  # never wrapped, because ids are copied and numbers are read


def runs(
    output: Format = Output.TABLE,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Show at most this many runs.")] = 20,
    where: Annotated[str | None, typer.Option(metavar="CONDITION", help=WHERE)] = None,
    sort: Annotated[str | None, typer.Option(metavar="COLUMN", help=SORT, show_default="newest first")] = None,
    columns: Annotated[str | None, typer.Option(metavar="COLUMN,...", help=COLUMNS)] = None,
    study: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show only the runs of this study.", autocompletion=complete_study),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat the list every second, until Ctrl-C.")] = False,
) -> None:
    """List runs, newest first."""
    list_once = partial(_list, output, limit, where, sort, columns, study)
    screen = console()
    if not watch or output is Output.JSON or not screen.is_terminal:  # a pipe gets one list
        list_once()
        return
    with Interrupts() as interrupts:
        while not interrupts.received:
            screen.clear()
            list_once()
            interrupts.wait(WATCH_SECONDS)


def _list(
    output: Output, limit: int, where: str | None, sort: str | None, columns: str | None, study: str | None
) -> None:
    from sparsebp_cli.tracking import describe_pages

    trials = {} if study is None else _find_trials(study)
    found = [run for run in list_runs() if study is None or run.run_id in trials]
    listing = _Listing(found, trials)
    if where is not None and found:
        listing.choose(where)
    chosen = _split(columns) if columns is not None else []
    for name in [*chosen, *([sort.removeprefix("-")] if sort is not None else [])]:
        listing.check(name)
    if sort is not None:
        listing.sort(sort)
    shown = listing.runs[:limit]
    answer = RunList(runs=[listing.full_line(run, chosen) for run in shown], not_shown=len(listing.runs) - len(shown))

    def show(answer: RunList) -> None:
        if not answer.runs:
            print_line(_describe_nothing(where, study, len(found)))
            return
        print_runs(answer.runs, chosen or list(USUAL if study is None else USUAL_OF_STUDY), tags=not chosen)
        if answer.not_shown:
            others = "older runs" if sort is None else "runs"
            print_line(f"{answer.not_shown} {others} are not shown; --limit {len(listing.runs)} shows all")
        if pages := describe_pages():
            print_line(pages)

    tell(answer, output, show)


class _Listing:
    """The listed runs and their values. Each value is read when needed."""

    def __init__(self, runs: Sequence[RunFolder], trials: Mapping[str, Mapping[str, str]]) -> None:
        self.runs = list(runs)
        self._trials = trials
        self._lines: dict[str, RunLine] = {}
        self._candidates: dict[str, RunCandidate] = {}

    def line(self, run: RunFolder) -> RunLine:
        """Return a run's plain values."""
        if run.run_id not in self._lines:
            of_study: dict[str, Any] = dict(self._trials.get(run.run_id, {}))
            self._lines[run.run_id] = replace(describe_run(run), **of_study)
        return self._lines[run.run_id]

    def full_line(self, run: RunFolder, columns: Sequence[str]) -> RunLine:
        """Return a run's plain values, with those of additional columns."""
        more = {name: self.value(run, name) for name in columns if name not in COLUMN and name not in OF_STUDY}
        return replace(self.line(run), columns=more)

    def value(self, run: RunFolder, name: str) -> object:
        """Return the value of a column; None if the run has none."""
        if name in COLUMN or name in OF_STUDY:
            return find_value(self.line(run), name)
        values = self._describe(run).find(name)
        return None if not values else values[0] if len(values) == 1 else ", ".join(map(str, values))

    def choose(self, where: str) -> None:
        """Keep the runs that meet a condition."""
        from sparsebp_cli.compare import choose

        candidates = [self._describe(run) for run in self.runs]
        try:
            kept = {candidate.run_id for candidate in choose(candidates, (), where, str(home()))}
        except RunNotFoundError:  # no run meets it: an empty list is a valid answer here
            kept = set()
        self.runs = [run for run in self.runs if run.run_id in kept]

    def check(self, name: str) -> None:
        """Raise ``UsageError`` for a column that none of the runs has."""
        from sparsebp_cli.compare.choose import SPECIAL, suggest_name
        from sparsebp_cli.run.metric import METRICS

        has_study = bool(self._trials)
        if name in COLUMN or name in SPECIAL or name in METRICS or (has_study and name in OF_STUDY) or not self.runs:
            return
        candidates = [self._describe(run) for run in self.runs]
        if any(candidate.find(name) for candidate in candidates):
            return
        raise UsageError(
            f"no run has the column {name!r}; use {', '.join(COLUMN)}, a key of the recipe, a metric or tag.NAME"
            f"{suggest_name(name, candidates, COLUMN)}"
        )

    def sort(self, order: str) -> None:
        """Sort by a column: numbers before texts, and runs without a value last."""
        name = order.removeprefix("-")
        found = {run.run_id: self.value(run, name) for run in self.runs}
        with_value = [run for run in self.runs if _is_known(found[run.run_id])]
        without = [run for run in self.runs if not _is_known(found[run.run_id])]
        with_value.sort(key=lambda run: _order(found[run.run_id]), reverse=order.startswith("-"))
        self.runs = with_value + without

    def _describe(self, run: RunFolder) -> RunCandidate:
        if not self._candidates:
            from sparsebp_cli.compare import local_candidates

            self._candidates = {candidate.run_id: candidate for candidate in local_candidates()}
        return self._candidates[run.run_id]


def find_value(line: RunLine, name: str) -> object:
    """Return the value of a column; None if the run has none."""
    if name in COLUMN:
        return COLUMN[name](line)
    return (getattr(line, name) or None) if name in OF_STUDY else line.columns.get(name)


def print_runs(lines: Sequence[RunLine], columns: list[str], *, tags: bool) -> None:
    """Print runs as a table, then the problems of their files. With ``tags``, show the tags if any run has one."""
    from rich.text import Text

    if tags and any(line.tags for line in lines):
        columns = [*columns, "tags"]
    rows = [[_show(line, name) for name in columns] for line in lines]
    numbers = [name for name in columns if name == "age" or any(_is_number(find_value(line, name)) for line in lines)]
    table = make_table(*columns, numbers=numbers)
    for column in table.columns:
        column.no_wrap = column.header in WHOLE
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    console().print(table)
    for line in lines:
        if line.problem:
            print_line(f"run {line.run_id}: {line.problem}")


def _show(line: RunLine, name: str) -> str | Text:
    from rich.text import Text

    value = find_value(line, name)
    if name == "state":
        return Text(line.state, style=STYLES.get(line.state, ""))
    if name == "step":
        return f"{line.step}/{line.max_steps}"
    if name == "age":
        return show_age(time.time() - line.created)
    if value is None:
        return ""
    if name == "eval/loss":
        return f"{value:.4f}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def describe_run(folder: RunFolder) -> RunLine:
    """Return a run's line in a table of runs. Its state is ``damaged`` if the plan is."""
    from sparsebp_cli.recipe.description import describe_policies

    labels = Labels.load(folder.path)
    line: dict[str, Any] = {"run_id": folder.run_id, "name": "?", "policy": "?", "state": "damaged"}
    line |= {"step": 0, "max_steps": 0, "seed": None, "eval_loss": None, "created": 0.0, "folder": str(folder.path)}
    line |= {"tags": list(labels.tags), "note": labels.note, "problem": ""}
    try:
        plan = folder.read_plan()
    except RunNotFoundError as error:
        return RunLine(**line | {"problem": str(error).removeprefix(f"run {folder.run_id}: ")})
    recipe, found = plan["recipe"], find_outline(folder.path)
    line |= {
        "name": recipe["name"],
        "policy": describe_policies(recipe),
        "max_steps": recipe["training"]["max_steps"],
        "seed": recipe["training"].get("seed"),
        "created": float(plan["created"]),
        "state": str(folder.state()),
        "step": found.step,
        "eval_loss": found.eval_loss,
        "problem": describe_unreadable(found.unreadable),
    }
    return RunLine(**line)


def _find_trials(study: str) -> dict[str, dict[str, str]]:
    """Return the trials of a study by the ids of their runs."""
    return {
        trial.run_id: {"arm": trial.arm, "combination": trial.combination, "role": trial.role}
        for trial in find_studies("--study").find(study).trials
    }


def _split(columns: str) -> list[str]:
    names = [name.strip() for name in columns.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--columns needs at least one column, such as {','.join(USUAL[:3])}; got {columns!r}")
    return list(dict.fromkeys(names))


def _describe_nothing(where: str | None, study: str | None, num_runs: int) -> str:
    if where is not None and num_runs:
        return f"none of {num_runs} runs meets {where!r}"
    if study is not None:
        return f"the study {study} has no runs yet under {home()}"
    return f"no runs yet under {home()}; `sparsebp run RECIPE` makes one"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_known(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _order(value: object) -> tuple[bool, float, str]:
    return (False, float(value), "") if isinstance(value, int | float) else (True, 0.0, str(value))
