"""Interleaved rounds: each round runs every variant once in a random order, so that a busy machine slows all of them
alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

from sparsebp_cli.bench import RoundQuartiles
from sparsebp_cli.plan.selection_gain import ceiling, realised_share
from sparsebp_cli.worker.bench.subject import Count, Pass, Subject
from sparsebp_cli.worker.bench.variant import Variant


def run_interleaved(
    variants: Sequence[tuple[Subject, Variant]],
    *,
    rounds: int,
    warmup: int,
    on_pass: Callable[[str], None] = lambda _: None,
    deadline: float | None = None,
) -> list[list[Pass]]:
    """Run warm-up and measured rounds, and return the passes of each variant. ``on_pass`` is called with a description
    before every pass. No round begins that would not end before ``deadline``, by ``time.monotonic()``, but at least one
    is measured."""
    longest = 0.0
    shuffle, found = random.Random(0), [list[Pass]() for _ in variants]
    for number in range(warmup + rounds):
        begin = time.monotonic()
        if number > warmup and deadline is not None and begin + longest > deadline:
            break
        order = list(range(len(variants)))
        shuffle.shuffle(order)
        what = f"warm-up {number + 1} of {warmup}" if number < warmup else f"round {number - warmup + 1} of {rounds}"
        for index in order:
            subject, variant = variants[index]
            on_pass(f"{what}: {variant.label}")
            result = subject.run(variant)
            if number >= warmup:
                found[index].append(result)
        longest = max(longest, time.monotonic() - begin) if number >= warmup else 0.0
    return found


def quartiles(values: Sequence[float]) -> RoundQuartiles:
    """Return median and quartiles, rounded to four significant digits; a single value is all three."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return RoundQuartiles(median=_round(median), low=_round(low), high=_round(high))


def ratios(passes: Sequence[Pass], plain: Sequence[Pass], of: Callable[[Pass], float]) -> RoundQuartiles:
    """Return quartiles of a time over that of plain PyTorch in the same round; below 1 is faster."""
    return quartiles([of(mine) / max(of(theirs), 1e-9) for mine, theirs in zip(passes, plain, strict=True)])


def bound(count: Count, plain: Count, ratio: float) -> tuple[float | None, float | None]:
    """Return the ceiling, None if nothing is claimed, and the realised share of that saving, None if there is none.
    ``ratio`` is forward plus backward over that of plain PyTorch."""
    if not count.dense_flops:
        return None, None
    left = plain.backward_flops - count.dense_flops + count.claimed_flops
    highest = ceiling(plain.forward_flops, plain.backward_flops, left)
    share = realised_share(1.0, ratio, highest)
    return round(highest, 4), None if share is None else round(share, 4)


def _round(value: float) -> float:
    return float(f"{value:.4g}")
