"""The share kept at which a form is as fast as another."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from sparsebp_tools.bench import BreakEven, find_break_even


def _find(*points: tuple[float, float]) -> BreakEven:
    return find_break_even("linears", "rows", "plain PyTorch", points)


def test_it_lies_on_the_line_between_the_two_shares_next_to_it() -> None:
    found = _find((0.5, 1.2), (0.1, 0.6), (0.25, 0.8))
    assert (found.kind, found.keep) == ("at", pytest.approx(0.25 + 0.25 * 0.2 / 0.4))
    assert found.words == "below 0.375"


def test_a_form_that_is_faster_or_slower_at_every_share_says_so() -> None:
    assert _find((0.5, 0.9), (0.1, 0.5)).words == "always (of 0.1 to 0.5)"
    assert _find((0.5, 1.9), (0.1, 1.0)).words == "never (of 0.1 to 0.5)"
    assert _find((0.5, 0.9)).words == "always (of 0.5)"
    assert _find((0.5, 0.9)).keep is None


def test_faster_at_a_larger_share_than_one_at_which_it_is_slower_is_unclear() -> None:
    assert _find((0.1, 1.1), (0.25, 0.9), (0.5, 1.2)).kind == "unclear"
    assert _find((0.1, 1.1), (0.25, 0.9)).kind == "unclear"


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to interpolate"):
        _find()
    with pytest.raises(ValidationError):
        BreakEven(site="", label="", against="", kind="at", keep=1.5, smallest=0.1, largest=0.5)


@given(
    st.floats(0.02, 0.9),
    st.floats(0.1, 5.0),
    st.lists(st.floats(0.005, 0.99), min_size=2, max_size=9, unique_by=lambda keep: round(keep, 3)),
)
def test_where_time_is_a_line_the_crossing_is_found(crossing: float, slope: float, keeps: list[float]) -> None:
    assume(all(abs(keep - crossing) > 1e-9 for keep in keeps))  # else it is a matter of rounding
    points = [(keep, 1.0 + slope * (keep - crossing)) for keep in keeps]
    found = _find(*points)
    if min(keeps) >= crossing:
        assert found.kind == "never"
    elif max(keeps) < crossing:
        assert found.kind == "always"
    else:
        assert found.keep == pytest.approx(crossing, abs=1e-6)
