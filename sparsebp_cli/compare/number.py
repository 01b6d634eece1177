"""Format numbers with three significant digits and their unit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparsebp_cli.compare.statistics import FEWEST_PAIRS, SAME, Difference, Quartiles, Spread

NONE = "-"
MOST_PLACES = 8  # after the decimal point; smaller numbers use a power of ten
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
FLOPS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))

Units = tuple[tuple[float, str], ...]


def scaled(value: float | None, units: Units, like: float | None = None) -> str:
    """Return a value in the largest unit that leaves a digit before the point, as ``182 ms``; a dash for None.
    ``units`` are (size, name), the largest first. ``like`` is a value that determines the unit instead, so that
    neighbouring numbers agree."""
    if value is None:
        return NONE
    size, name = next((unit for unit in units if abs(like or value) >= unit[0]), units[-1])
    return f"{_short(value / size)} {name}"


def of_spread(value: Spread | None, digits: int = 4) -> str:
    """Return ``3.214 ± 0.012 (5)``; without a standard deviation for a single value."""
    if value is None:
        return NONE
    if value.sd is None:
        return f"{value.mean:.{digits}g} ({value.n})"
    if value.sd <= SAME * abs(value.mean):
        return f"{value.mean:.{digits}g} ± 0 ({value.n})"
    if value.sd < 10.0**-MOST_PLACES:
        return f"{value.mean:.6g} ± {value.sd:.1e} ({value.n})"
    places = _places(value.sd)
    return f"{value.mean:.{places}f} ± {value.sd:.{places}f} ({value.n})"


def of_difference(value: Difference | None) -> str:
    """Return ``+0.050 [+0.031, +0.069]``; without an interval if there is none."""
    if value is None:
        return NONE
    low, high = value.shown
    if low is None or high is None:
        return f"{value.mean:+.3g}"
    mean, first, last = _alike(low, high, value.mean, low, high)
    return f"{mean} [{first}, {last}]"


def show_ends(low: float | None, high: float | None) -> str:
    """Return the ends of an interval, ``+0.031 to +0.069``; a dash for None."""
    if low is None or high is None:
        return NONE
    return " to ".join(_alike(low, high, low, high))


def _alike(low: float, high: float, *values: float) -> list[str]:
    """Format numbers with as many places as leave two digits of half the interval, because more would be noise."""
    half = (high - low) / 2 or max(abs(low), abs(high))
    if 0.0 < half < 10.0**-MOST_PLACES:
        return [f"{value:+.2e}" for value in values]
    return [f"{value:+.{_places(half)}f}" for value in values]


def _places(value: float) -> int:
    """Return the places after the point that leave two digits of the rounded number: 0.0999... is 0.10."""
    return min(MOST_PLACES, max(0, 1 - int(f"{value:.1e}".partition("e")[2]))) if 0.0 < value < math.inf else 0


def of_quartiles(value: Quartiles | None, units: Units) -> str:
    """Return ``182 ms [180, 185]``, with the quartiles in the median's unit; without quartiles below three values."""
    if value is None:
        return NONE
    size, name = next((unit for unit in units if value.median >= unit[0]), units[-1])
    if value.n < FEWEST_PAIRS:
        return f"{_short(value.median / size)} {name}"
    low, high = _short(value.low / size), _short(value.high / size)
    return f"{_short(value.median / size)} {name} [{low}, {high}]"


def of_phases(values: Sequence[float | None], step: Quartiles | None) -> str:
    """Return ``36 + 42 + 2.5 ms``, in the unit of the step."""
    if step is None or all(value is None for value in values):
        return NONE
    size, name = next((unit for unit in SECONDS if step.median >= unit[0]), SECONDS[-1])
    return (
        " + ".join(NONE if value is None else f"{value / size:.{0 if value >= 10 * size else 1}f}" for value in values)
        + f" {name}"
    )


def of_share(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.1%}" if abs(value) < 0.1 else f"{value:.0%}"


def of_factor(value: float | None) -> str:
    """Return ``1.47x``."""
    return NONE if value is None else f"{value:.2f}x"


def show_ratio(mean: float, low: float | None, high: float | None) -> str:
    """Return a ratio as ``0.58 [0.57, 0.60]``; without an interval if there is none, or if it has no width."""
    return f"{mean:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None and low < high else "")


def of_ratio(value: Difference | None) -> str:
    """Return a ratio like :func:`show_ratio`; a dash for None."""
    return NONE if value is None else show_ratio(value.mean, *value.shown)


def of_change(value: Difference | None) -> str:
    """Return a ratio as ``-18.4 % [-19.6, -17.1]``; without an interval if there is none."""
    return NONE if value is None else show_change(value.mean, *value.shown)


def show_change(mean: float, low: float | None, high: float | None) -> str:
    """Return a ratio and the ends of its interval, like :func:`of_change`."""
    change, *ends = (None if x is None else f"{100 * (x - 1.0):+.1f}" for x in (mean, low, high))
    return f"{change} %" + ("" if None in ends else f" [{ends[0]}, {ends[1]}]")


def of_p(value: Difference | None) -> str:
    """Return the p value behind a statement: ``0.031``, ``<0.001``."""
    return of_p_value(None if value is None else value.decisive_p)


def of_p_value(p: float | None) -> str:
    """Return ``0.031``, ``<0.001``."""
    if p is None:
        return NONE
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def of_plain(value: float | None, digits: int = 3) -> str:
    """Return a number without a unit."""
    return NONE if value is None else f"{value:.{digits}g}"


def _short(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
