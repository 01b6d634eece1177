"""Which micro-batches of a training are counted, so that the mean cost of all of them is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparsebp_lab.exchange import Interval

FEWEST, MOST = 16, 64  # counted micro-batches; with fewer a schedule that begins late is not seen
KNOWN = 0.005  # half of the interval of the cost, relative


def spread(total: int) -> Iterator[int]:
    """Yield numbers below a total that are spread evenly, however many are taken: van der Corput's sequence."""
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
    """Return whether counts of a policy and of dense tell their ratio."""
    if len(counts) < FEWEST:
        return False
    share = Interval.of_ratio(counts)
    return share.high - share.value <= KNOWN * share.value
