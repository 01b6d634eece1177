"""Run interleaved rounds, so that a busy machine slows all variants equally; compute table rows and break-evens."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparsebp_cli.plan import reached_share, speedup_limit
from sparsebp_cli.policy import GradientSelector
from sparsebp_tools.bench import BenchForm, BenchmarkRow, BreakEven, RoundQuartiles, find_break_even
from sparsebp_tools.bench.subject import Count, Pass, Subject
from sparsebp_tools.bench.variant import Variant


def run_interleaved(
    variants: Sequence[tuple[Subject, Variant]],
    *,
    rounds: int,
    warmup: int,
    on_pass: Callable[[str], None] = lambda _: None,
    deadline: float | None = None,
) -> list[list[Pass]]:
    """Run warm-up and measured rounds, and return the passes of each variant. ``on_pass`` gets a description before
    every pass. No round begins that would not end before ``deadline``, by ``time.monotonic()``, but at least one is
    measured."""
    longest = 0.0
    shuffle, found = random.Random(0), [list[Pass]() for _ in variants]
    for number in range(warmup + rounds):
        begin = time.monotonic()
        if number > warmup and deadline is not None and begin + longest > deadline:
            break
        order = list(range(len(variants)))
        # Shuffle each round; otherwise a variant would always follow the same other one.
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
    """Return the speed-up limit, None without an estimate, and the reached fraction of its saving, None without a
    saving. ``ratio`` is forward plus backward over that of plain PyTorch."""
    if not count.dense_flops:
        return None, None
    left = plain.backward_flops - count.dense_flops + count.claimed_flops
    highest = speedup_limit(plain.forward_flops, plain.backward_flops, left)
    share = reached_share(1.0, ratio, highest)
    return round(highest, 4), None if share is None else round(share, 4)


def _round(value: float) -> float:
    return float(f"{value:.4g}")


# Executions of one form between which function.CSR_BELOW chooses.
RIVALS = {("csr", "masked")}


@dataclass(frozen=True)
class BenchCase:
    """A variant and its place in the table."""

    variant: Variant
    form: BenchForm | None = None  # of the policy; None: all gradients are kept
    keep: float | None = None  # kept fraction; None if the form has no such option


def make_row(case: BenchCase, count: Count, passes: list[Pass], plain: Count, plain_passes: list[Pass]) -> BenchmarkRow:
    """Summarise the counts and passes of one variant, one pass a round, relative to those of plain PyTorch."""
    variant, form = case.variant, case.form
    ratio = ratios(passes, plain_passes, lambda one: one.both)
    highest, realised = bound(count, plain, ratio.median)
    peak_ratio = None
    if count.peak_bytes is not None and plain.peak_bytes:
        peak_ratio = round(count.peak_bytes / plain.peak_bytes, 4)
    note = ""
    if form is not None and form.execution == "csr" and count.backward_flops >= plain.backward_flops:
        note = "ran with a mask, because PyTorch multiplies no sparse (CSR) matrices of this dtype here"
    cost = (count.forward_flops + count.backward_flops) / (plain.forward_flops + plain.backward_flops)
    policy = case.variant.policy
    chooses = isinstance(policy, GradientSelector) and policy.selection is not None
    return BenchmarkRow(
        site=variant.sites or "",
        label=variant.label if form is None else form.label,
        execution="dense" if form is None else form.execution,
        keep=case.keep,
        seconds=quartiles([one.both for one in passes]),
        ratio=ratio,
        backward_ratio=ratios(passes, plain_passes, lambda one: one.backward),
        step_ratio=ratios(passes, plain_passes, lambda one: one.step),
        processor_ratio=ratios(passes, plain_passes, lambda one: one.processor),
        forward_flops=count.forward_flops,
        backward_flops=count.backward_flops,
        flops_ratio=round(count.backward_flops / plain.backward_flops, 4),
        ceiling=highest,
        realised_share=realised,
        saved_bytes=count.saved_bytes,
        saved_ratio=round(count.saved_bytes / plain.saved_bytes, 4),
        peak_bytes=count.peak_bytes,
        peak_ratio=peak_ratio,
        kept_share=None if count.kept_share is None or form is None else round(count.kept_share, 6),
        cost_ratio=round(cost, 4),
        unit_worth=round(cost / count.kept_share, 4) if chooses and count.kept_share else None,
        note=note,
        passes=[one.as_dict() for one in passes],
    )


def break_evens(forms: Sequence[BenchForm], rows: list[BenchmarkRow]) -> list[BreakEven]:
    """Return the break-evens against plain PyTorch of forms with a kept fraction, then those between two executions of
    one form. The first row is plain PyTorch."""
    found = [_break_even(form, None, rows) for form in forms]
    for one, other in itertools.permutations(forms, 2):
        same = (one.site, one.options) == (other.site, other.options)
        if same and (one.execution, other.execution) in RIVALS:
            found.append(_break_even(one, other, rows))
    return [one for one in found if one is not None]


def _break_even(form: BenchForm, other: BenchForm | None, rows: list[BenchmarkRow]) -> BreakEven | None:
    mine = {row.keep: row for row in rows if (row.site, row.label) == (form.site, form.label)}
    points = []
    for keep, row in mine.items():
        theirs = rows[0] if other is None else _find(rows, other, keep)
        if keep is not None and theirs is not None:
            pairs = zip(row.passes, theirs.passes, strict=True)
            ratio = statistics.median(_both(a) / max(_both(b), 1e-9) for a, b in pairs)
            points.append((keep, ratio))
    against = rows[0].label if other is None else other.label
    return find_break_even(form.site, form.label, against, points) if points else None


def _find(rows: list[BenchmarkRow], form: BenchForm, keep: float | None) -> BenchmarkRow | None:
    return next((row for row in rows if (row.site, row.label, row.keep) == (form.site, form.label, keep)), None)


def _both(seconds: dict[str, float]) -> float:
    return seconds["forward"] + seconds["backward"]
