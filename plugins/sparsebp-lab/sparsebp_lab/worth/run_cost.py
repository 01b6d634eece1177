"""Choose the micro-batches of a training to count, so that the mean cost of all of them is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparsebp_lab.exchange import RateInterval

FEWEST, MOST = 16, 64  # counted micro-batches; fewer would miss a schedule that begins late
KNOWN = 0.005  # half of the relative interval of the cost


def spread(total: int) -> Iterator[int]:
    """Yield numbers below ``total`` that are evenly spread at any length: van der Corput's sequence."""
    seen = set[int]()
    for number in range(2 * MOST):
        place, unit, left = 0.0, 0.5, number
        while left:
            left, digit = divmod(left, 2)
            place, unit = place + digit * unit, unit / 2
        found = int(place * total)
        if found not in seen and len(seen) < MOST:
            seen.add(found)
            yield found


def is_known(counts: Sequence[tuple[float, float]]) -> bool:
    """Return whether the counts of a policy and of dense determine their ratio precisely enough."""
    if len(counts) < FEWEST:
        return False
    share = RateInterval.of_ratio(counts)
    return share.high - share.value <= KNOWN * share.value
