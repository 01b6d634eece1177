"""Renders a comparison as JSON, CSV or Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.compare.view import View, view_grids
from sparsebp_cli.errors import UsageError, did_you_mean

FORMATS = ("json", "csv", "md")
CSV_COLUMNS = ("level", "group", "label", "run", "seed", "state", "counts", "figure", "value")


def render(comparison: Comparison, format: str, view: View | None = None) -> str:  # noqa: A002 - the option's own name
    """Return a comparison as ``json`` (everything, with ``schema``), ``csv`` (one number a line) or ``md``.

    ``view`` restricts ``md``; None is everything. The text ends with a line break. Raises ``UsageError`` for another
    format.
    """
    if format == "json":
        return json.dumps(asdict(comparison), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    if format == "csv":
        return _to_csv(comparison)
    if format == "md":
        return _to_markdown(comparison, view or View())
    raise UsageError(f"the format must be one of {', '.join(FORMATS)}, got {format!r}{did_you_mean(format, FORMATS)}")


def _to_csv(comparison: Comparison) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for group in comparison.groups:
        states = " ".join(f"{count} {state}" for state, count in group.states.items())
        place = ("group", group.group, group.label, "", "", states, "")
        figures = {"quality": asdict(group.quality), "speed": asdict(group.speed), "cost": asdict(group.cost)}
        writer.writerows((*place, name, value) for name, value in _flatten(figures, ""))
    for run in comparison.runs:
        place = ("run", run.group, run.label, run.run_id, _seed(run.seed), run.state, str(run.counts).lower())
        figures_of_run = {"quality": run.quality, "step_seconds": run.step_seconds, "steps": run.steps}
        figures_of_run["attempts"] = run.attempts
        writer.writerows((*place, name, value) for name, value in figures_of_run.items())
        writer.writerows((*place, f"curve.{name}.{p.step}", p.value) for name, c in run.curves.items() for p in c)
    return text.getvalue()


def _seed(seed: int | None) -> str:
    return "" if seed is None else str(seed)


def _flatten(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in pairs:
            yield from _flatten(child, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _to_markdown(comparison: Comparison, view: View) -> str:
    lines: list[str] = []
    whole = view.kind == "overview"
    for grid in grids(comparison) if whole else view_grids(comparison, view):
        rule = ["---" if number < grid.aside else "--:" for number in range(len(grid.columns))]
        lines += [f"### {_cell(grid.title)}", "", _row(grid.columns), _row(rule)]
        lines += [_row(row) for row in grid.rows]
        lines += ["", *([_cell(grid.note), ""] if grid.note else [])]
        lines += ["```console", *(f"$ {command}" for command in grid.commands), "```", ""] if grid.commands else []
    if not whole:
        return "\n".join(lines)
    if comparison.warnings:
        lines += ["### Warnings", "", *(f"- {_cell(warning)}" for warning in comparison.warnings), ""]
    lines += [
        "### In words",
        "",
        *(f"- **{_cell(group.label)}**: {_cell(group.verdict)}" for group in comparison.groups),
    ]
    return "\n".join(lines) + "\n"


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    """Escape only what would break a table or start a tag."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
