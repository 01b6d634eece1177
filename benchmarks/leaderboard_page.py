"""Draws the leaderboard: one matrix, one picture, and what is behind each cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from leaderboard_result import STATED, Result, Row, list_controls, list_methods
from markupsafe import Markup

COLUMNS = (
    *("task", "arm", "control", "others", "seed", "quality", "metric"),
    *("steps", "batch", "learning_rate", "flops_of_best_control", "run"),
)
WIDTH, LEFT, ROW, GAP, RIGHT = 1120.0, 130.0, 22.0, 44.0, 24.0  # of the picture, in its own units


def render(results: Sequence[Result]) -> str:
    """Return the page."""
    loader = jinja2.ChoiceLoader(
        [jinja2.FileSystemLoader(Path(__file__).parent / "page"), jinja2.PackageLoader("sparsebp_cli.page", "")]
    )
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["embed"] = lambda name: Markup(loader.get_source(environment, name)[0])
    return (
        environment.get_template("leaderboard.html").render(
            results=results,
            single=[one.name for one in results if _is_single(one)],
            methods=list_methods(results),
            controls=list_controls(results),
            lines=[describe(one) for one in results],
            picture=draw(results) if results else None,
        )
        + "\n"
    )


def _is_single(result: Result) -> bool:
    """Whether the best control trains on one example a step."""
    best = result.find(result.best)
    return best is not None and best.batch == 1


def describe(result: Result) -> str:
    """Say how many methods are lower and higher than the best control, and which; of those of others, beside which."""
    methods = [row for row in result.rows if not row.is_control and not row.others]
    words = dict.fromkeys([*STATED, *(row.outcome for row in methods)])
    parts = [f"{word}: {', '.join(row.arm for row in methods if row.outcome == word) or 'none'}" for word in words]
    theirs = [f" {row.arm} ({row.others}), beside {row.best}: {row.outcome}." for row in result.rows if row.others]
    return f"{result.name}, beside {result.best}: {'; '.join(parts)}.{''.join(theirs)}"


def draw(results: Sequence[Result]) -> dict[str, Any]:
    """Return the picture's coordinates: a panel a task, a line a method, its difference to the best control."""
    names = [name for name in list_methods(results) if any(one.find(*name) for one in results)]
    wide = (WIDTH - LEFT - RIGHT - GAP * (len(results) - 1)) / len(results)
    panels = [_panel(one, names, LEFT + number * (wide + GAP), wide) for number, one in enumerate(results)]
    height = 34.0 + ROW * len(names) + 34.0
    labels = [{"y": 34.0 + ROW * (number + 0.5), "text": name} for number, (name, _) in enumerate(names)]
    return {"width": WIDTH, "height": height, "labels": labels, "panels": panels, "bottom": height - 34.0}


def _panel(result: Result, names: Sequence[tuple[str, str]], left: float, wide: float) -> dict[str, Any]:
    rows = [row for name in names if (row := result.find(*name)) is not None and row.difference is not None]
    ends = [0.0, *(end for row in rows for end in (row.difference, row.low, row.high) if end is not None)]
    low, high = min(ends), max(ends)
    span = (high - low) or 1.0
    low, high = low - span / 20, high + span / 20

    def across(value: float) -> float:
        return round(left + wide * (value - low) / (high - low), 1)

    return {
        "name": result.name,
        "left": round(left, 1),
        "zero": across(0.0),
        "ticks": [{"x": across(end), "text": f"{end:+.2f}"} for end in {min(ends), max(ends)} if end],
        "points": [
            {
                "x": across(row.difference or 0.0),
                "low": across(row.low if row.low is not None else row.difference or 0.0),
                "high": across(row.high if row.high is not None else row.difference or 0.0),
                "y": 34.0 + ROW * (names.index((row.arm, row.others)) + 0.5),
                "shown": row.outcome in {"lower", "higher"},
                "text": f"{row.arm}, {result.name}: {row.outcome}, {row.difference:+.4f}",
            }
            for row in rows
        ],
    }


def write_data(results: Sequence[Result]) -> str:
    """Return the data as CSV, one row a run of the report."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        for row in sorted(result.rows, key=lambda row: (row.others, row.arm)):
            for run in sorted(row.runs, key=lambda run: (run["seed"], run["run_id"])):
                writer.writerow(_line(result, row, run))
    return out.getvalue()


def _line(result: Result, row: Row, run: dict[str, Any]) -> list[object]:
    return [
        result.name,
        row.arm,
        "yes" if row.is_control else "no",
        row.others,
        run["seed"],
        run["quality"],
        result.metric,
        run["steps"],
        row.batch,
        row.rate,
        "" if row.flops is None else round(row.flops, 4),
        run["run_id"],
    ]
