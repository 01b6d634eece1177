"""How numbers are written: three digits that mean something, and the unit beside them."""

from __future__ import annotations

from sparsebp_cli.compare.statistics import Difference, Quartiles, Spread

NONE = "-"
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
FLOPS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))

Units = tuple[tuple[float, str], ...]


def scaled(value: float | None, units: Units, like: float | None = None) -> str:
    """Return a value in the largest unit that leaves a digit before the point.

    Args:
        value: In the base unit.
        units: (size, name), the largest first.
        like: Choose the unit for this value instead, so that numbers side by side agree.

    Returns:
        ``182 ms``; a dash for None.
    """
    if value is None:
        return NONE
    size, name = next((unit for unit in units if abs(like or value) >= unit[0]), units[-1])
    return f"{_short(value / size)} {name}"


def of_spread(value: Spread | None, digits: int = 4) -> str:
    """Return ``3.214 ± 0.012 (5)``; without a standard deviation where there is one value."""
    if value is None:
        return NONE
    if value.sd is None:
        return f"{value.mean:.{digits}g} ({value.n})"
    return f"{value.mean:.{digits}g} ± {value.sd:.2g} ({value.n})"


def of_difference(value: Difference | None) -> str:
    """Return ``+0.05 [+0.03, +0.07]``; without an interval where there is none."""
    if value is None:
        return NONE
    if value.low is None or value.high is None:
        return f"{value.mean:+.3g}"
    return f"{value.mean:+.3g} [{value.low:+.3g}, {value.high:+.3g}]"


def of_quartiles(value: Quartiles | None, units: Units) -> str:
    """Return ``182 ms [180, 185]``, the quartiles in the unit of the median."""
    if value is None:
        return NONE
    size, name = next((unit for unit in units if value.median >= unit[0]), units[-1])
    low, high = _short(value.low / size), _short(value.high / size)
    return f"{_short(value.median / size)} {name} [{low}, {high}]"


def of_share(value: float | None) -> str:
    """Return a share as a percentage."""
    if value is None:
        return NONE
    return f"{value:.1%}" if abs(value) < 0.1 else f"{value:.0%}"


def of_factor(value: float | None) -> str:
    """Return ``1.47x``."""
    return NONE if value is None else f"{value:.2f}x"


def of_speedup(value: float | None, low: float | None, high: float | None) -> str:
    """Return ``1.47x [1.44, 1.49]``, the extremes over seeds."""
    text = of_factor(value)
    return text if low is None or high is None or value is None else f"{text} [{low:.2f}, {high:.2f}]"


def of_plain(value: float | None, digits: int = 3) -> str:
    """Return a number without a unit."""
    return NONE if value is None else f"{value:.{digits}g}"


def _short(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
