"""One side of a comparison at a time, as tables."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from sparsebp_cli.compare import Comparison, Question, View, compare_runs, render, table
from sparsebp_cli.compare.figure import thin
from sparsebp_cli.compare.view import view_grid
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import RunFolder

MakeRun = Callable[..., RunFolder]
TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}
VIEWS = [View("train/loss", "tokens"), View("eval/loss")]


@pytest.fixture
def comparison(make_run: MakeRun) -> Comparison:
    """Dense, a policy that is faster and worse, and one that is slower and worse."""
    facts = {"tokens_per_step": 1024}
    slow: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.5}], "exact": False}
    runs = []
    for name, loss, seconds, options in (
        ("dense", 3.0, 0.2, {}),
        ("fast", 3.3, 0.1, TOPK | {"claimed": 0.1}),
        ("slow", 3.4, 0.3, slow),
    ):
        runs += [make_run(name, s, loss=loss + s / 10, seconds=seconds, facts=facts, **options) for s in range(3)]
    return compare_runs(runs, Question(curves=("train/loss",)))


def cells(comparison: Comparison, view: View) -> list[tuple[str, ...]]:
    return list(view_grid(comparison, view).rows)


def test_a_curve_has_a_row_a_step_with_mean_and_spread_of_each_group(comparison: Comparison) -> None:
    assert cells(comparison, View("eval/loss")) == [
        ("0", "6 ± 0 (3)", "6 ± 0 (3)", "6 ± 0 (3)"),
        ("10", "4.10 ± 0.10 (3)", "4.40 ± 0.10 (3)", "4.50 ± 0.10 (3)"),
        ("20", "3.10 ± 0.10 (3)", "3.40 ± 0.10 (3)", "3.50 ± 0.10 (3)"),
    ]


def test_a_curve_against_time_says_nothing_of_a_run_that_was_over_before(comparison: Comparison) -> None:
    rows = cells(comparison, View("eval/loss", along="wall_time"))
    assert len(rows) == 11
    assert rows[0] == ("0 s", "6 ± 0 (3)", "6 ± 0 (3)", "6 ± 0 (3)")
    assert rows[-1][1:] == ("-", "-", "3.50 ± 0.10 (3)")
    half = next(row for row in rows if float(row[0].split()[0]) > 3.0)
    assert half[1:] == ("4.10 ± 0.10 (3)", "-", "4.50 ± 0.10 (3)")


def test_a_long_curve_is_thinned_to_what_a_screen_shows(comparison: Comparison) -> None:
    rows = cells(comparison, View("train/loss"))
    assert (len(rows), rows[0][0], rows[-1][0]) == (12, "1", "20")


def test_a_curve_against_tokens_counts_them(comparison: Comparison) -> None:
    rows = cells(comparison, View("eval/loss", along="tokens"))
    assert [row[0] for row in rows] == ["0", "10,240", "20,480"]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view.metric}-{view.along}")
def test_every_view_fits_100_columns_and_can_be_written(comparison: Comparison, view: View) -> None:
    console = Console(width=100, file=io.StringIO(), color_system=None)
    for part in table(comparison, view):
        console.print(part)
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "dense: baseline" not in text
    assert "…" not in text
    assert "| --- |" in render(comparison, "md", view)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view.metric}-{view.along}")
def test_a_view_of_runs_without_numbers_is_still_a_table(make_run: MakeRun, view: View) -> None:
    empty = compare_runs([make_run(end="failed", steps=0), make_run("b", end="failed", steps=0)])
    assert view_grid(empty, view).rows == ()


def test_curves_are_thinned_evenly_and_keep_both_ends() -> None:
    assert thin(range(9)) == tuple(range(9))
    found = thin(range(1000))
    assert (len(found), found[0], found[-1]) == (400, 0, 999)
    assert max(b - a for a, b in itertools.pairwise(found)) <= 3
    assert len(thin(range(1000), 1)) == 20


def test_a_curve_that_no_run_logged_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(
        UsageError, match=r"^--curves must be a metric that these runs logged .*did you mean train/loss\?$"
    ):
        compare_runs([make_run()], Question(curves=("train/los",)))
