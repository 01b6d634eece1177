"""The curves of a comparison as tables of text."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from sparsebp_cli.compare import Comparison, Question, compare_runs
from sparsebp_cli.compare.curve_grid import curve_grid
from sparsebp_cli.compare.figure import thin
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import RunFolder

MakeRun = Callable[..., RunFolder]


@pytest.fixture
def comparison(make_run: MakeRun) -> Comparison:
    runs = []
    for name, loss, steps, keep in (("dense", 3.0, 20, 0.0), ("worse", 3.3, 20, 0.1), ("short", 3.4, 10, 0.5)):
        policy = {"policy": [{"name": "topk", "keep": keep}], "exact": False} if keep else {}
        runs += [make_run(name, s, loss=loss + s / 10, steps=steps, **policy) for s in range(3)]
    return compare_runs(runs, Question(curves=("train/loss",)))


def test_a_curve_has_a_row_a_step_with_mean_and_spread_of_each_group(comparison: Comparison) -> None:
    grid = curve_grid(comparison, "eval/loss")
    assert grid.columns == ("step", "dense", "worse", "short")
    assert grid.rows[0] == ("0", "6 ± 0 (3)", "6 ± 0 (3)", "6 ± 0 (3)")
    assert grid.rows[-1] == ("20", "3.10 ± 0.10 (3)", "3.40 ± 0.10 (3)", "-")  # a run that ended before is left out


def test_a_long_curve_is_thinned_to_what_a_page_shows(comparison: Comparison) -> None:
    rows = curve_grid(comparison, "train/loss").rows
    assert (len(rows), rows[0][0], rows[-1][0]) == (12, "1", "20")


def test_a_curve_of_runs_without_numbers_is_still_a_table(make_run: MakeRun) -> None:
    empty = compare_runs([make_run(end="failed", steps=0), make_run("b", end="failed", steps=0)])
    assert curve_grid(empty, "eval/loss").rows == ()


def test_curves_are_thinned_evenly_and_keep_both_ends() -> None:
    assert thin(range(9)) == tuple(range(9))
    found = thin(range(1000))
    assert (len(found), found[0], found[-1]) == (400, 0, 999)
    assert max(b - a for a, b in itertools.pairwise(found)) <= 3
    assert len(thin(range(1000), 1)) == 20


def test_a_curve_that_no_run_logged_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(
        UsageError, match=r"^curves must be a metric that these runs logged .*did you mean train/loss\?$"
    ):
        compare_runs([make_run()], Question(curves=("train/los",)))
