"""Numbers as people read them."""

from __future__ import annotations

import pytest

from sparsebp_cli.cli.quantity import show_age, show_clock, show_count, show_seconds, show_share


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00042, "0.42 ms"),
        (0.0098, "9.80 ms"),
        (0.098, "98.0 ms"),
        (0.9996, "1000 ms"),
        (1.25, "1.25 s"),
        (160.4, "160 s"),
    ],
)
def test_short_durations_have_three_digits(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0:00"), (59.6, "1:00"), (725, "12:05"), (10809, "3:00:09")])
def test_long_durations_are_a_clock(seconds: float, text: str) -> None:
    assert show_clock(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(12, "12 s"), (300, "5 min"), (10800, "3 h"), (172800, "2 d")])
def test_ages_are_rough(seconds: float, text: str) -> None:
    assert show_age(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(812e6, "812 MB"), (1.5e12, "1.50 TB"), (64, "64 B"), (0, "0 B")])
def test_counts_have_a_prefix(value: float, text: str) -> None:
    assert show_count(value, "B") == text


@pytest.mark.parametrize(("share", "text"), [(0.1, "10 %"), (0.005, "0.5 %"), (1.0, "100 %")])
def test_shares_are_percent(share: float, text: str) -> None:
    assert show_share(share) == text
