"""Withhold measured numbers that may not be shown, before any statement is made.

Outputs do not decide this themselves, and none can print a number that is not there.
"""

from __future__ import annotations

from dataclasses import replace

from sparsebp_cli.compare.measured import Busy, Quality, Speed


def withhold_times(speed: Speed, quality: Quality, baseline: Speed | None, *, same_hardware: bool) -> Speed:
    """Return a group's speed without unreliable times. If its own machine was busy, withhold all times of
    whole steps. If the baseline's was, or two runs drifted apart by more than the policy can save, withhold times
    compared with the baseline. ``baseline`` is the baseline's measured speed; None for the baseline itself. On other
    hardware than the baseline's, a drift cannot be detected."""
    busy = {"its": speed.busy, "the baseline's": None if baseline is None else baseline.busy}
    found = {whose: some for whose, some in busy.items() if some is not None}
    if found:
        why = _describe_busy(found)
    elif baseline is not None and same_hardware and (limit := _find_drift(speed, quality, baseline)) is not None:
        why = (
            "the machine's speed changed between the runs: the step times differ by more than the policy can save, at "
            f"most {100 * (limit - 1):+.0f} % of forward and backward"
        )
    else:
        return speed
    speed = replace(speed, withheld=why, step_ratio=None, backward_ratio=None)
    if found and speed.busy is None:
        return speed  # its own times are from a quiet machine
    speed = replace(speed, step=None, forward=None, backward=None, optimizer=None)
    return replace(speed, tokens_per_second=None, training_seconds=None)


def _find_drift(speed: Speed, quality: Quality, baseline: Speed) -> float | None:
    """Return the smallest ratio of forward and backward that the policy allows, if two runs had a smaller one on equal
    batches; else None. A step that keeps a fraction of the work takes at least that fraction of the time."""
    own, there = (
        None if some.forward is None or some.backward is None else some.forward.median + some.backward.median
        for some in (speed, baseline)
    )
    same_batch = quality.unequal is None or quality.unequal.same_batch
    if own is None or not there or not speed.limit or not same_batch or not _seems_faster(speed, baseline):
        return None
    limit = 1.0 / speed.limit
    return limit if own / there < limit else None


def _seems_faster(speed: Speed, baseline: Speed) -> bool:
    """Return whether a statement would call the group's steps faster."""
    if speed.step_ratio is not None and speed.step_ratio.high is not None:
        return speed.step_ratio.high < 1.0
    return speed.step is not None and baseline.step is not None and speed.step.high < baseline.step.low


def _describe_busy(found: dict[str, Busy]) -> str:
    runs = " and ".join(f"{busy.runs} of {whose} {busy.of} runs" for whose, busy in found.items())
    shares = [busy.cpu_share for busy in found.values() if busy.cpu_share is not None]
    loads = [busy.load for busy in found.values() if busy.load is not None]
    how = [f"{min(shares):.0%} of the CPU time that a quiet machine gives"] if shares else []
    how += [f"load {max(loads):.1f} per CPU"] if loads else []
    return f"the machine was busy in {runs} ({', '.join(how)})"
