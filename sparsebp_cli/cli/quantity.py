"""Format numbers for people."""

from __future__ import annotations

_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def show_seconds(seconds: float) -> str:
    """Return a short duration: ``0.42 ms``, ``98 ms``, ``1.25 s``."""
    if seconds < 0.001:
        return f"{seconds * 1000:.2f} ms"
    if seconds < 1.0:
        return f"{_three(seconds * 1000)} ms"
    return f"{_three(seconds)} s"


def show_clock(seconds: float) -> str:
    """Return a long duration: ``0:42``, ``12:05``, ``3:00:09``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_age(seconds: float) -> str:
    """Return how long ago something was: ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def show_count(value: float, unit: str = "") -> str:
    """Return a large number: ``812 MB``, ``1.2 TFLOP``, ``64``."""
    for size, prefix in _STEPS:
        if abs(value) >= size:
            return f"{_three(value / size)} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def show_share(share: float) -> str:
    """Return a fraction in percent: ``10 %``, ``0.5 %``."""
    return f"{100 * share:.3g} %"


def _three(value: float) -> str:
    """Format with three digits, without an exponent."""
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
