"""Ways take turns: every round runs each once, in another order, so that a busy machine slows all of them alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

from sparsebp_cli.bench import Quartiles
from sparsebp_cli.plan.cost import ceiling, realised_share
from sparsebp_cli.worker.bench.subject import Count, Pass, Subject
from sparsebp_cli.worker.bench.way import Way

Watch = Callable[[str], None]  # told before every pass: what comes now


def take_turns(
    ways: Sequence[tuple[Subject, Way]],
    *,
    rounds: int,
    warmup: int,
    watch: Watch = lambda _: None,
    deadline: float | None = None,
) -> list[list[Pass]]:
    """Run all ways in turn.

    Args:
        ways: At least one, each with what it runs on.
        rounds: That are measured, from 1.
        warmup: Rounds before those.
        watch: Is told before every pass.
        deadline: By ``time.monotonic()``: no round begins that would not end before it, but at least one is measured;
            None: never.

    Returns:
        The passes of each way, as many for each.
    """
    longest = 0.0
    shuffle, found = random.Random(0), [list[Pass]() for _ in ways]
    for number in range(warmup + rounds):
        begin = time.monotonic()
        if number > warmup and deadline is not None and begin + longest > deadline:
            break
        order = list(range(len(ways)))
        shuffle.shuffle(order)
        what = f"warm-up {number + 1} of {warmup}" if number < warmup else f"round {number - warmup + 1} of {rounds}"
        for index in order:
            subject, way = ways[index]
            watch(f"{what}: {way.label}")
            result = subject.run(way)
            if number >= warmup:
                found[index].append(result)
        longest = max(longest, time.monotonic() - begin) if number >= warmup else 0.0
    return found


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return median and quartiles, rounded to four digits; of one value, that value.

    Args:
        values: At least one.

    Returns:
        The three.
    """
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Quartiles(median=_round(median), low=_round(low), high=_round(high))


def ratios(passes: Sequence[Pass], plain: Sequence[Pass], of: Callable[[Pass], float]) -> Quartiles:
    """Return quartiles of a time over that of plain PyTorch in the same round.

    Args:
        passes: One a round.
        plain: Of the same rounds.
        of: Which time.

    Returns:
        Below 1 is faster.
    """
    return quartiles([of(mine) / max(of(theirs), 1e-9) for mine, theirs in zip(passes, plain, strict=True)])


def bound(count: Count, plain: Count, ratio: float) -> tuple[float | None, float | None]:
    """Return ceiling and realised share.

    Args:
        count: Of a way.
        plain: Of plain PyTorch.
        ratio: Forward plus backward over plain PyTorch's.

    Returns:
        The largest speed-up if time went with FLOPs, None where nothing is claimed; and the share of that saving that
        was realised, None where there is none.
    """
    if not count.dense_flops:
        return None, None
    left = plain.backward_flops - count.dense_flops + count.claimed_flops
    highest = ceiling(plain.forward_flops, plain.backward_flops, left)
    share = realised_share(1.0, ratio, highest)
    return round(highest, 4), None if share is None else round(share, 4)


def _round(value: float) -> float:
    return float(f"{value:.4g}")
