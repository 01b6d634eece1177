"""Every printed cell of a comparison is a number of its JSON record, under the heading of that number.

The test finds the record of a column by itself: it writes each number of the record in every form that a face uses,
and keeps the paths that give the cells of a column in all comparisons. So a new column without a record fails.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from sparsebp_cli.compare import Comparison, Question, compare_runs, render
from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.answer import answer_grid
from sparsebp_cli.compare.overview_grid import grids
from sparsebp_cli.compare.statistics import Difference, Quartiles, Spread
from sparsebp_cli.run import RunFolder

from .test_faces import draw_runs, write_card

MakeRun = Callable[..., RunFolder]
Forms = dict[str, set[str]]  # how a number is written, to the paths of the record that are written so
UNITS = {"bytes": show.BYTES, "flops": show.FLOPS, "seconds": show.SECONDS}
NO_RECORD = {"Recipe differences", "Other differences", "Runs that no mean includes", "Controls"}  # of recipes and runs
NUMBER = re.compile(r"[-+<]?\d[\d.,]*(?:e[-+]\d+)?x?%?(?: (?:[kMGTP]?B|[MGTP]?FLOP|m?s|µs))?")
METRIC, COURSE, BASE = "{metric}", "{course}", "{base}"
OF_QUALITY = {"final": METRIC, "difference": METRIC, "at_equal": COURSE, "unequal": COURSE}  # the metric of a path


@dataclass(frozen=True)
class Face:
    """A table as a reader sees it: heading, columns, rows by label, and the text that explains it."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: str


@dataclass
class Columns:
    """What was found of each column over all comparisons."""

    paths: dict[tuple[str, ...], set[str]] = field(default_factory=dict)
    kinds: dict[tuple[str, ...], set[str]] = field(default_factory=dict)  # of the intervals in it
    faults: list[str] = field(default_factory=list)


def find_leaves(record: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield each number, spread, difference and quartiles of a record with its path; places in lists are left out."""
    match record:
        case {"family_low": _, "mean": _}:
            yield path, Difference(**{k: v for k, v in record.items() if k not in {"pairs", "dropped"}})
        case {"mean": _, "sd": _, "n": _}:
            yield path, Spread(**record)
        case {"median": _, "low": _, "high": _, "n": _}:
            yield path, Quartiles(**record)
        case dict():
            for key, value in record.items():
                yield from find_leaves(value, f"{path}.{key}" if path else str(key))
        case list():
            for value in record:
                yield from find_leaves(value, path)
        case bool():
            pass
        case int() | float():
            yield path, record


def write_forms(path: str, value: object) -> set[str]:
    """Return how a face may write a number. A unit is written only of a number whose name has it."""
    units = next((units for end, units in UNITS.items() if end in path.rpartition(".")[2]), None)
    match value:
        case Difference():
            ratio = (
                {show.of_change(value), show.of_ratio(value), f"{value.mean:.2f}"}
                if "ratio" in path or path.endswith("cost")
                else set()
            )
            ratio |= {f"{1 / value.mean:.2f}x"} if ratio and value.mean else set()
            return ratio or {show.of_difference(value), show.of_p(value), str(value.n), f"{value.mean:+.3g}"}
        case Spread():
            return {show.of_spread(value), f"{value.mean:.4g}", f"{value.sd or 0.0:.2g}", str(value.n)}
        case Quartiles():
            scaled = {show.of_quartiles(value, show.SECONDS), show.scaled(value.median, show.SECONDS)}
            parts = {f"{value.median / size:.{n}f}" for size, _ in show.SECONDS for n in (0, 1)}
            return scaled | parts | {f"{part} {name}" for part in parts for _, name in show.SECONDS}
        case int() | float():
            if units is not None:
                return {show.scaled(float(value), units)}
            if path.endswith((".p", ".p_holm")):
                return {show.of_p_value(value)}
            shared = {show.of_share(value), show.of_factor(value), f"{1.0 / value:.2f}"} if value else set()
            return (
                shared
                | {f"{value:.{n}g}" for n in (2, 3, 4)}
                | {f"{value:.2f}", f"{value:.0f}", f"{value:.0f} dense steps"}
            )
    raise TypeError(value)


def find_forms(group: Mapping[str, Any], base: Mapping[str, Any]) -> Forms:
    """Return every written form of a group's record, with the shares of its FLOPs, and with the baseline's time and
    memory times their paired ratios, as quality against cost has them."""
    forms: Forms = {}
    found = list(find_leaves({k: v for k, v in group.items() if k not in {"recipe", "changes", "layers"}}))
    flops = {path: value for path, value in found if path.endswith("_flops") and isinstance(value, float)}
    found += [(f"{path} / cost.dense_flops", value / flops["cost.dense_flops"]) for path, value in flops.items()]
    for path, ratio, whole in (
        ("cost.held_bytes", group["cost"]["held_ratio"], base["cost"]["held_bytes"]),
        ("speed.step_seconds", group["speed"]["step_ratio"], (base["speed"]["step"] or {}).get("median")),
    ):
        found += [(path, whole * ratio["mean"])] if ratio and whole else []
    for path, value in found:
        for text in write_forms(path.partition(" / ")[0] if "/" not in path else "share", value):
            forms.setdefault(text, set()).add(path)
    return forms


def list_faces(comparison: Comparison) -> Iterator[Face]:
    """Yield every table of the terminal. The first of the HTML page is the answer."""
    shown = [("answer", answer_grid(comparison)), *(("all", grid) for grid in grids(comparison))]
    for name, grid in shown:
        yield Face(name, grid.title, grid.columns, grid.rows, f"{grid.title} {grid.note}")


def generalise(comparison: Comparison, text: str) -> str:
    """Return a heading with metric, metric of the course, and baseline by what they are."""
    text = text.replace(comparison.metric, METRIC)
    text = text if comparison.course == comparison.metric else text.replace(comparison.course, COURSE)
    return text.replace(comparison.groups[0].label, BASE)


def read(columns: Columns, comparison: Comparison, faces: Iterator[Face] | list[Face]) -> None:
    """Find the paths of every column of the faces in the JSON of a comparison."""
    records = {group["label"]: group for group in json.loads(render(comparison, "json"))["groups"]}
    forms = {label: find_forms(group, records[comparison.groups[0].label]) for label, group in records.items()}
    for face in faces:
        if any(face.title.startswith(title) for title in NO_RECORD):
            continue
        heading = generalise(comparison, face.title)
        named = [generalise(comparison, column) for column in face.columns]
        for label, *cells in face.rows:
            for place, cell in enumerate(cells, start=1):
                known = forms[label].get(cell)
                key = (face.name, heading, *named[: place + 1])
                if not any(letter.isdigit() for letter in cell):
                    continue
                if known is not None and not records[label]["baseline"]:  # its 1.00 is that of several numbers
                    columns.paths[key] = columns.paths.get(key, known) & known
                    read_kind(columns, key, records[label], cell, face.text)
                elif known is None and (
                    lost := [word for word in NUMBER.findall(cell) if not is_known(word, forms[label], records)]
                ):
                    columns.faults.append(
                        f"{face.name}, {face.title or 'table'}, {face.columns[place]}: {lost} of {cell!r}"
                    )


def is_known(word: str, forms: Forms, records: Mapping[str, Any]) -> bool:
    """Whether a word with a number of a longer cell is in the record, or is part of a label."""
    return word.strip(".,") in forms or any(word in label for label in records)


def read_kind(columns: Columns, key: tuple[str, ...], record: Mapping[str, Any], cell: str, text: str) -> None:
    """Note the kind of an interval in a cell, and whether the text of its face names this kind."""
    if "[" not in cell:
        return
    leaves = [value for path, value in find_leaves(record) if isinstance(value, Difference)]
    of = [value for value in leaves if cell in {show.of_difference(value), show.of_change(value), show.of_ratio(value)}]
    kinds = {"simultaneous" if value.family_low is not None else "95% interval" for value in of}
    columns.kinds.setdefault(key, set()).update(kinds)
    for kind in kinds if len(kinds) == 1 else ():
        words = ("simultaneous",) if kind == "simultaneous" else ("95% interval", "for itself")
        if not any(word in text for word in words):
            columns.faults.append(f"{key}: an interval of the kind '{kind}', which nothing in the face says")


def list_faults(columns: Columns) -> list[str]:
    """Return what is wrong: cells without a record, columns of no single record, headings of another metric."""
    found = list(dict.fromkeys(columns.faults))
    for (name, title, *headings), paths in columns.paths.items():
        if not paths:
            found.append(f"{name}, {title}, {headings[-1]}: its cells are not those of one number of the record")
            continue
        nearest = next((one for one in (*reversed(headings), title) if METRIC in one or COURSE in one), "")
        parts = {path.split(".")[1] if path.startswith("quality.") else "" for path in paths}
        if parts and parts <= OF_QUALITY.keys() and not any(path.endswith("amount") for path in paths):
            metrics = {OF_QUALITY[part] for part in parts}
            if not any(metric in nearest for metric in metrics):
                found.append(f"{name}, {title}, {headings[-1]}: holds {sorted(metrics)}, its heading says {nearest!r}")
    return found


@pytest.fixture
def drawn(make_run: MakeRun) -> list[Comparison]:
    """Comparisons of random groups, of which each is evaluated on validation and on a test split."""
    found = []
    for seed in (0, 2, 5):
        runs = draw_runs(make_run, random.Random(seed), is_tested=True)
        found.append(compare_runs(runs, Question(margin=0.2)))
    return found


def test_every_cell_is_a_number_of_the_record_under_its_metric_and_kind(drawn: list[Comparison]) -> None:
    columns = Columns()
    for comparison in drawn:
        read(columns, comparison, list_faces(comparison))
    assert "\n".join(list_faults(columns)) == ""
    assert {"answer", "all"} == {name for name, *_ in columns.paths}
    assert len(columns.paths) > 30
    assert {"simultaneous", "95% interval"} <= set().union(*columns.kinds.values())


def test_a_column_without_a_record_and_one_under_another_metric_are_found(drawn: list[Comparison]) -> None:
    columns = Columns()
    for comparison in drawn:
        grid = answer_grid(comparison)
        rows = tuple((*row[:1], f"{0.12345 + number:.5f}", row[2]) for number, row in enumerate(grid.rows))
        invented = Face("invented", "", ("group", "saving", comparison.metric), rows, "simultaneous 95% interval")
        wrong = Face("wrong", comparison.course, grid.columns, grid.rows, "simultaneous 95% interval")
        silent = Face("silent", grid.title, grid.columns, grid.rows, "")
        read(columns, comparison, [invented, wrong, silent])
    faults = list_faults(columns)
    assert [fault for fault in faults if fault.startswith("invented, table, saving")]
    assert [fault for fault in faults if fault.startswith("wrong") and "holds ['{metric}']" in fault]
    assert [fault for fault in faults if "silent" in fault and "which nothing in the face says" in fault]


def test_every_number_of_a_card_is_that_of_its_run(make_run: MakeRun) -> None:
    runs = draw_runs(make_run, random.Random(2), is_tested=True)
    names = ("eval/loss", "test/loss", "eval/accuracy")
    for run in (runs[0], runs[-1]):
        record = json.loads(render(compare_runs([run], replace(Question(), curves=names)), "json"))["runs"][0]
        lines = re.findall(r"^\| `(\S+)`[^|]*\| (\S*) *\| (\S+) \|", write_card(run), re.MULTILINE)
        assert {name for name, *_ in lines} <= set(names)
        for name, before, value in lines:
            points = record["curves"][name]
            assert value == f"{points[-1][3]:.4g}"
            assert before in {"", f"{points[0][3]:.4g}"}
