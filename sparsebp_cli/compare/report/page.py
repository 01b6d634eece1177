"""Puts the page together: everything that a reader needs is in the text, the drawings are made by the page itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from sparsebp_cli.compare.comparison import Comparison, Kind
from sparsebp_cli.compare.control import WORDS
from sparsebp_cli.compare.family import CLAIMS
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.compare.question import find_course
from sparsebp_cli.compare.report.appendix import environment_grid, reproduce, runs_grid
from sparsebp_cli.compare.trade import find_trades
from sparsebp_cli.compare.verdict import split_statements
from sparsebp_cli.compare.view import View, view_grids
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import metric
from sparsebp_cli.run.visible import make_visible

REPORT_CURVES = (metric.EVAL_LOSS.name, metric.TRAIN_LOSS.name, metric.KEPT_SHARE.name, metric.COSINE.name)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
NUM_COLOURS = 7
DASHES = ("", "7 4", "9 3 2 3", "2 3")  # those of page.js, and so are the marks
MARKS = (
    "M16 2a4 4 0 1 0 .01 0z",
    "M12.4 2.4h7.2v7.2h-7.2z",
    "M16 1.2l4.4 8h-8.8z",
    "M16 .8l5.2 5.2l-5.2 5.2l-5.2 -5.2z",
)


def write_report(comparison: Comparison, path: Path, command: str = "") -> Path:
    """Write the report of a comparison.

    Args:
        comparison: What was compared, with the curves of ``REPORT_CURVES``.
        path: Where to; ``.html``. It is replaced.
        command: That made it; empty leaves it out.

    Returns:
        The path.

    Raises:
        UsageError: The ending is another one, or the folder does not exist.
    """
    if path.suffix.lower() not in {".html", ".htm"}:
        raise UsageError(f"a report's name must end in .html, got {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} for the report")
    path.write_text(render_report(comparison, command), encoding="utf-8")
    return path


def render_report(comparison: Comparison, command: str = "") -> str:
    """Return the report of a comparison as HTML.

    Args:
        comparison: What was compared.
        command: That made it; empty leaves it out.

    Returns:
        One page, style, script and data inside.
    """
    names = ", ".join(group.label for group in comparison.groups)
    parts = [
        _head(comparison, names),
        _words(comparison),
        _notes(comparison),
        _drawings(comparison),
        _numbers(comparison),
        *(_table(grid) for grid in grids(comparison, everything=True)),
        _table(runs_grid(comparison)),
        _table(environment_grid(comparison)),
        reproduce(comparison, command),
    ]
    data = json.dumps(_make_visible(_data(comparison)), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{escape(names)}: compared</title><style>{_file('page.css')}</style></head><body><main>",
            *parts,
            "</main>",
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{_file('page.js')}{_file('memory.js')}</script></body></html>\n",
        ]
    )
    return make_visible(page)


def _head(comparison: Comparison, names: str) -> str:
    counted = sum(run.counts for run in comparison.runs)
    which = f", {comparison.better} is better" if comparison.better else ""
    unit = f" in {comparison.unit}" if comparison.unit else ""
    said = f"{comparison.metric}{unit} ({comparison.reducer}{which}); {counted} of {len(comparison.runs)} runs count"
    if comparison.margin is not None:
        said += f"; margin {comparison.margin:g}"
    base = comparison.groups[0].label
    return (
        f"<header><p class=kicker>SparseBP comparison</p><h1>{escape(names)}</h1>"
        f"<p>Held against <b>{escape(base)}</b>. {escape(said)}.</p></header>"
    )


def _words(comparison: Comparison) -> str:
    cards = []
    for number, group in enumerate(comparison.groups):
        first, *rest = split_statements(group.verdict)
        items = "".join(f"<li>{escape(part)}</li>" for part in rest)
        more = f"<ul>{items}</ul>" if items else ""
        cards.append(
            f"<article><h3>{_sample(number)}{escape(group.label)}</h3><p>{escape(_capital(first))}.</p>{more}</article>"
        )
    return f'<section><h2>In words</h2><div class="cards">{"".join(cards)}</div></section>'


def _sample(number: int) -> str:
    """How a group is drawn: colours repeat after seven groups, so its dashes and its mark are shown with it."""
    line = (
        f'<path d="M0 6H32" stroke="currentColor" stroke-width="2" stroke-dasharray="{DASHES[number % len(DASHES)]}"/>'
    )
    mark = f'<path d="{MARKS[number % len(MARKS)]}" fill="currentColor"/>'
    return f'<svg class="sample g{number % NUM_COLOURS}" viewBox="0 0 32 12" aria-hidden="true">{line}{mark}</svg>'


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if not text.startswith(("eval/", "train/")) else text


def _notes(comparison: Comparison) -> str:
    missing = [control for control in comparison.controls if not control.found]
    if not comparison.warnings and not missing:
        return ""
    items = [f"<li>{escape(warning)}</li>" for warning in comparison.warnings]
    together: dict[tuple[Kind, str], list[str]] = {}
    for control in missing:
        together.setdefault((control.kind, control.command), []).append(control.label)
    items += [_missing(kind, command, labels) for (kind, command), labels in together.items()]
    return f'<section class="warn"><h2>Before believing it</h2><ul>{"".join(items)}</ul></section>'


def _missing(kind: Kind, command: str, labels: list[str]) -> str:
    said = f"{', '.join(labels)}: not compared with {WORDS[kind]}"
    how = f"; to make that run: <code>{escape(command)}</code>" if command else ""
    return f"<li>{escape(said)}{how}</li>"


def _drawings(comparison: Comparison) -> str:
    """Empty places that the script fills; what they show is in tables, too."""
    has_layers = any(group.layers.figures for group in comparison.groups)
    told = "The drawings need JavaScript; what they would show is in the tables below."
    blocks = [f"<noscript><p class=note>{told}</p></noscript>"]
    if len(comparison.groups) > 1:
        blocks.append(
            "<section><h2>Differences to the baseline</h2><div id=forest class=charts></div>"
            "<p class=note>Mean, 95% interval and single pairs (circles), paired by seed. "
            f"{_tell_simultaneous(comparison)}An interval across the line shows no difference, which is not proof of "
            f"equality.{_tell_busy(comparison)}</p></section>"
        )
    blocks.append("<section><h2>Curves</h2><div id=curves></div></section>")
    blocks.append(
        "<section><h2>Quality against cost</h2><div id=pareto></div><p class=note>Points that no other beats in both "
        f"are joined; bars are one standard deviation over seeds.{_tell_busy(comparison)}</p></section>"
    )
    if has_layers:
        blocks.append("<section><h2>Layers</h2><div id=layers></div></section>")
    if any(group.memory for group in comparison.groups):
        blocks.append(
            "<section><h2>Memory over one step</h2><div id=memory></div><p class=note>All that PyTorch's allocator had "
            "given out, moment by moment, in a step that was watched; on one scale. Its peaks are in a table below."
            "</p></section>"
        )
    return "".join(blocks)


def _busy(comparison: Comparison) -> list[str]:
    """Groups whose step times allow no statement: all, where they are the baseline's."""
    slowed = [group.label for group in comparison.groups if group.speed.busy is not None]
    return [group.label for group in comparison.groups] if comparison.groups[0].label in slowed else slowed


def _tell_busy(comparison: Comparison) -> str:
    busy = _busy(comparison)
    return f" Left out are step times from a busy machine: {escape(', '.join(busy))}." if busy else ""


def _tell_simultaneous(comparison: Comparison) -> str:
    count = next((family.statements for family in comparison.families if family.name == CLAIMS), 0)
    if count < 2:
        return ""
    return f"The {count} intervals are simultaneous: the chance that any of them misses the truth is at most 5%. "


def _numbers(comparison: Comparison) -> str:
    """The curves and the layers as tables: for whoever cannot see them, or has no script."""
    curves = [name for name in REPORT_CURVES if any(run.counts and run.curves.get(name) for run in comparison.runs)]
    parts = {
        "curves": [grid for name in curves for grid in view_grids(comparison, View("curves", name))],
        "layers": view_grids(comparison, View("layers")),
    }
    return "".join(
        f"<details><summary>The {word} in numbers</summary>{tables}</details>"
        for word, some in parts.items()
        if (tables := "".join(map(_table, some)))
    )


def _table(grid: Grid) -> str:
    def cells(row: Iterable[str], tag: str, start: int = 0) -> str:
        scope = " scope=col" if tag == "th" else ""
        places = enumerate(row, start)
        styled = ((f"{tag}{'' if place < grid.aside else ' class=n'}{scope}", cell) for place, cell in places)
        return "".join(f"<{opening}>{escape(cell)}</{tag}>" for opening, cell in styled)

    if not grid.rows:
        return ""
    body = "".join(f"<tr><th scope=row>{escape(row[0])}</th>{cells(row[1:], 'td', 1)}</tr>" for row in grid.rows)
    note = f"<p class=note>{escape(grid.note)}</p>" if grid.note else ""
    if grid.commands:
        note += f"<pre><code>{escape(chr(10).join(grid.commands))}</code></pre>"
    table = f"<table><thead><tr>{cells(grid.columns, 'th')}</tr></thead><tbody>{body}</tbody></table>"
    title = escape(grid.title)
    return (
        f'<section><h2>{title}</h2><div class="scroll" tabindex="0" role="region" aria-label="{title}">{table}</div>'
        f"{note}</section>"
    )


def _data(comparison: Comparison) -> dict[str, Any]:
    number = {group.group: place for place, group in enumerate(comparison.groups)}
    busy = _busy(comparison)
    return {
        "metric": comparison.metric,
        "course": find_course(comparison.metric),
        "better": comparison.better,
        "units": {name: known.unit for name, known in metric.METRICS.items() if known.unit},
        "groups": [group.label for group in comparison.groups],
        "runs": [
            {"group": number[run.group], "seed": run.seed, "id": run.run_id, "curves": run.curves}
            for group in comparison.groups
            for run in comparison.beside(group)
        ],
        "trades": [asdict(trade) for trade in find_trades(comparison)],
        "differences": [
            {
                "group": number[group.group],
                "quality": asdict(group.quality.difference) if group.quality.difference else None,
                "step": None if group.label in busy or not group.speed.step_ratio else asdict(group.speed.step_ratio),
                "peak": asdict(group.cost.peak_ratio) if group.cost.peak_ratio else None,
            }
            for group in comparison.groups
            if not group.baseline
        ],
        "memory": [
            {"label": group.label, "step": group.memory.step, "points": group.memory.curve.to_values()["points"]}
            for group in comparison.groups
            if group.memory is not None
        ],
        "layers": [
            asdict(group.layers) | {"label": group.label} for group in comparison.groups if group.layers.figures
        ],
    }


def _make_visible(value: Any) -> Any:
    """The script writes these texts into the page, where a browser would obey a mark of writing direction."""
    match value:
        case str():
            return make_visible(value)
        case dict():
            return {make_visible(str(key)): _make_visible(child) for key, child in value.items()}
        case list() | tuple():
            return [_make_visible(child) if isinstance(child, str | dict | list | tuple) else child for child in value]
    return value


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
