"""Render the HTML report of a comparison. Text and tables hold every number; page.js draws the charts from the data."""

from __future__ import annotations

import base64
import json
import shlex
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.answer import answer_grid
from sparsebp_cli.compare.comparison import Comparison, Group, Kind
from sparsebp_cli.compare.control import WORDS
from sparsebp_cli.compare.curve_grid import curve_grid
from sparsebp_cli.compare.family import CLAIMS
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.loaded import flatten
from sparsebp_cli.compare.number import SECONDS
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.compare.page import check_path, render
from sparsebp_cli.compare.report.headline import find_withheld, join_names, make_headline
from sparsebp_cli.compare.trade import find_trades
from sparsebp_cli.compare.words import say
from sparsebp_cli.run import durable, metric
from sparsebp_cli.run.visible import make_visible, mask

REPORT_CURVES = (metric.EVAL_LOSS.name, metric.TRAIN_LOSS.name, metric.KEPT_SHARE.name, metric.COSINE.name)
NUM_COLOURS = 7
DASHES = ("", "7 4", "9 3 2 3", "2 3")  # as in page.js; the marks too
MARKS = (
    "M16 2a4 4 0 1 0 .01 0z",
    "M12.4 2.4h7.2v7.2h-7.2z",
    "M16 1.2l4.4 8h-8.8z",
    "M16 .8l5.2 5.2l-5.2 5.2l-5.2 -5.2z",
)


def write_report(comparison: Comparison, path: Path, command: str = "", more: Iterable[Grid] = ()) -> Path:
    """Write the report of a comparison to an ``.html`` file, with the curves of ``REPORT_CURVES``, and return its path.
    ``command`` is the command that made the report; an empty one is left out. ``more`` are additional tables. Raise
    ``UsageError`` for another suffix or a missing folder."""
    check_path(path)
    durable.write_file(path, render_report(comparison, command, more))
    return path


def render_report(comparison: Comparison, command: str = "", more: Iterable[Grid] = ()) -> str:
    """Return the report as HTML with embedded style, script and data. An empty command is left out."""
    from markupsafe import Markup

    data = json.dumps(_make_visible(_data(comparison)), allow_nan=False, separators=(",", ":"))
    curves = [name for name in REPORT_CURVES if any(run.counts and run.curves.get(name) for run in comparison.runs)]
    page_grids = _filled(
        [
            *grids(comparison, everything=True),
            *more,
            samples_grid(comparison),
            runs_grid(comparison),
            environment_grid(comparison),
        ]
    )
    curve_grids = _filled(curve_grid(comparison, name) for name in curves)
    missing = _missing_controls(comparison)
    return render(
        __package__,
        "page.html",
        comparison=comparison,
        names=join_names([group.label for group in comparison.groups]),
        basis=_basis(comparison),
        headline=make_headline(comparison),
        answer=answer_grid(comparison, is_short=False),
        num_doubts=len(comparison.warnings) + len(missing),
        cards=[_make_card(number, group) for number, group in enumerate(comparison.groups)],
        missing=missing,
        num_simultaneous=next((family.statements for family in comparison.families if family.name == CLAIMS), 0),
        withheld_note=_describe_withheld(comparison),
        has_layers=any(group.layers.figures for group in comparison.groups),
        curve_grids=curve_grids,
        grids=page_grids,
        contents=_list_contents(comparison, page_grids, has_numbers=bool(curve_grids), has_missing=bool(missing)),
        appendix=make_appendix(comparison, command),
        data=Markup(data.replace("<", "\\u003c")),  # a "</script>" inside the data would end the script element
    )


def _list_contents(
    comparison: Comparison, grids: list[Grid], *, has_numbers: bool, has_missing: bool
) -> list[tuple[str, str]]:
    """Return anchor and title of every folded section of the page, in its order."""
    groups = comparison.groups
    parts = {
        ("words", "In words"): True,
        ("doubts", "Before you believe the result"): bool(comparison.warnings) or has_missing,
        ("differences", "Differences to the baseline"): len(groups) > 1,
        ("course", "Curves"): True,
        ("depth", "Layers"): any(group.layers.figures for group in groups),
    }
    found = [part for part, is_there in parts.items() if is_there]
    found += [(f"table-{number}", grid.title) for number, grid in enumerate(grids, start=1)]
    found += [("numbers-curves", "The curves in numbers")] if has_numbers else []
    return [*found, ("again", "How to repeat the comparison")]


def _basis(comparison: Comparison) -> str:
    """Describe the metric and how many runs count."""
    counted = sum(run.counts for run in comparison.runs)
    direction = f" ({comparison.better} is better)" if comparison.better else ""
    unit = f" in {comparison.unit}" if comparison.unit else ""
    margin = "" if comparison.margin is None else f"; margin {comparison.margin:g}"
    runs = f"{counted} of {len(comparison.runs)} runs compared"
    return f"{comparison.metric}{unit}{direction}; {runs}{margin}"


@dataclass(frozen=True)
class _Card:
    """A group's statements, and its drawing style. Colours repeat after seven groups, so dashes and mark differ too."""

    label: str
    first: str
    others: list[str]
    colour: int
    dashes: str
    mark: str


def _make_card(number: int, group: Group) -> _Card:
    first, *others = map(say, group.statements)
    dashes, mark = DASHES[number % len(DASHES)], MARKS[number % len(MARKS)]
    return _Card(group.label, first, others, number % NUM_COLOURS, dashes, mark)


@dataclass(frozen=True)
class _MissingControl:
    """A control without runs, and the command that makes them; empty if there is none."""

    text: str
    command: str


def _missing_controls(comparison: Comparison) -> list[_MissingControl]:
    labels: dict[tuple[Kind, str], list[str]] = {}
    for control in comparison.controls:
        if not control.found:
            labels.setdefault((control.kind, control.command), []).append(control.label)
    return [
        _MissingControl(f"{', '.join(names)}: not compared with {WORDS[kind]}", command)
        for (kind, command), names in labels.items()
    ]


def _filled(grids: Iterable[Grid]) -> list[Grid]:
    return [grid for grid in grids if grid.rows]


def _describe_withheld(comparison: Comparison) -> str:
    withheld = find_withheld(comparison)
    return f" Unreliable step times are withheld: {', '.join(withheld)}." if withheld else ""


def _data(comparison: Comparison) -> dict[str, object]:
    number = {group.group: place for place, group in enumerate(comparison.groups)}
    return {
        "metric": comparison.metric,
        "course": comparison.course,
        "better": comparison.better,
        "units": {name: known.unit for name, known in metric.METRICS.items() if known.unit}
        | ({comparison.metric: comparison.unit, comparison.course: comparison.unit} if comparison.unit else {}),
        "groups": [group.label for group in comparison.groups],
        "costs": [group.speed.relative_cost for group in comparison.groups],
        "runs": [
            {"group": number[run.group], "seed": run.seed, "id": run.run_id, "curves": run.curves}
            | {"quality": run.quality, "step": run.step_seconds}
            for group in comparison.groups
            for run in comparison.comparable_runs(group)
        ],
        "trades": [asdict(trade) for trade in find_trades(comparison)],
        "differences": [
            {
                "group": number[group.group],
                "quality": asdict(group.quality.difference) if group.quality.difference else None,
                "step": asdict(group.speed.step_ratio) if group.speed.step_ratio else None,
                "held": asdict(group.cost.held_ratio) if group.cost.held_ratio else None,
            }
            for group in comparison.groups
            if not group.baseline
        ],
        "layers": [
            asdict(group.layers) | {"label": group.label} for group in comparison.groups if group.layers.figures
        ],
    }


def _make_visible(value: object) -> object:
    """Escape marks of writing direction, because the script writes these texts and a browser would interpret them."""
    match value:
        case str():
            return make_visible(value)
        case dict():
            return {make_visible(str(key)): _make_visible(child) for key, child in value.items()}
        case list() | tuple():
            return [_make_visible(child) if isinstance(child, str | dict | list | tuple) else child for child in value]
    return value


def samples_grid(comparison: Comparison) -> Grid:
    """Return the texts that the first run of each group generated, beside the reference texts in the data."""
    first = {run.group: run for run in reversed(comparison.runs) if run.samples and run.counts}
    rows = tuple(
        (group.label, str(sample.step), sample.prompt, sample.reference, sample.prediction)
        for group in comparison.groups
        if group.group in first
        for sample in first[group.group].samples
    )
    note = "Texts of each group's first compared run, at its first, middle and last generation on validation. Long "
    note += "texts are shortened. These are examples, not a measurement."
    columns = ("group", "step", "prompt", "reference", "generated")
    return Grid("Generated texts", columns, rows, note, aside=len(columns))


def runs_grid(comparison: Comparison) -> Grid:
    """Return one row for each run, including runs that do not count."""
    rows = []
    for run in comparison.runs:
        commit = f"{run.git_sha[:10]}{' + changes' if run.dirty else ''}" or show.NONE
        day = time.strftime("%Y-%m-%d %H:%M", time.gmtime(run.created)) if run.created else show.NONE
        rows.append(
            (
                run.label,
                str(run.seed),
                run.run_id,
                run.state if run.counts or run.state in run.reason else f"{run.state}; {run.reason}",
                str(run.steps),
                show.of_plain(run.quality, 4),
                show.scaled(run.step_seconds, SECONDS),
                day,
                run.version or show.NONE,
                commit,
            )
        )
    columns = ("group", "seed", "run", "state", "steps", comparison.metric, "step", "made (UTC)", "SparseBP", "commit")
    note = "No mean includes runs that did not finish, diverged or were repeated."
    return Grid("Every run", columns, tuple(rows), note, aside=4)


def environment_grid(comparison: Comparison) -> Grid:
    """Return one row for each property of the environments and each of its values."""
    values: dict[str, dict[str, dict[str, None]]] = {}
    for run in comparison.runs:
        for key, value in flatten(run.environment).items():
            if value not in ("", None, {}, []):
                shown = show.scaled(float(value), show.BYTES) if key.endswith("_bytes") else str(value)
                values.setdefault(key.replace("_bytes", ""), {}).setdefault(shown, {})[run.label] = None
    rows = tuple(
        (key, value, "all" if len(found) == 1 else ", ".join(labels))
        for key, found in values.items()
        for value, labels in found.items()
    )
    return Grid("Environment", ("what", "value", "groups"), rows, aside=3)


@dataclass(frozen=True)
class RecipeText:
    """A recipe as YAML."""

    file_name: str
    text: str

    @property
    def base64(self) -> str:
        """The YAML as the base64 of a data URL."""
        return base64.b64encode(self.text.encode()).decode()


@dataclass(frozen=True)
class Appendix:
    """The commands and recipes that reproduce every run and the report."""

    made_with: str
    commands: tuple[str, ...]
    recipes: tuple[RecipeText, ...]


def make_appendix(comparison: Comparison, command: str) -> Appendix:
    """Collect the commands and recipes. An empty ``command`` is left out."""
    lines = []
    for group in comparison.groups:
        seeds = ",".join(str(seed) for seed in group.seeds)
        lines.append(f"sparsebp run {_file_name(group)}" + (f" --seeds {seeds}" if seeds else ""))
    if command:
        lines.append(mask(command))
    versions = sorted({run.version for run in comparison.runs if run.version})
    commits = sorted({run.git_sha for run in comparison.runs if run.git_sha})
    made_with = f"Made with SparseBP {', '.join(versions)}" if versions else ""
    made_with += f", commit {', '.join(commits)}" if commits else ""
    return Appendix(made_with, tuple(lines), tuple(_recipe(group) for group in comparison.groups))


def _file_name(group: Group) -> str:
    return shlex.quote(f"{group.label.replace('#', '-')}.yaml")


def _recipe(group: Group) -> RecipeText:
    import yaml

    text = yaml.safe_dump(_without_store(group.recipe), sort_keys=False, allow_unicode=True, width=100)
    return RecipeText(_file_name(group), text)


def _without_store(recipe: dict[str, object]) -> dict[str, object]:
    """Leave out the store's address: it may name a private machine, and readers have another store."""
    tracking = recipe.get("tracking")
    return recipe | (
        {"tracking": {k: v for k, v in tracking.items() if k != "uri"}} if isinstance(tracking, dict) else {}
    )
