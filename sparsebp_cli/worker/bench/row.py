"""From passes and counts to rows of the table, and to break-evens."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sparsebp_cli.bench import BreakEven, Form, Row, find_break_even
from sparsebp_cli.plan.worth import Worth
from sparsebp_cli.policy import GradientSelector
from sparsebp_cli.worker.bench.subject import Count, Pass
from sparsebp_cli.worker.bench.turn import bound, quartiles, ratios
from sparsebp_cli.worker.bench.way import Way

# Two executions of one form. Between the first two kernel.CSR_BELOW decides, between the others checkpointing: sparse.
RIVALS = {("csr", "masked"), ("recomputed", "stored")}


@dataclass(frozen=True)
class Candidate:
    """A way, and where it stands in the table.

    Args:
        way: How it is computed.
        form: Of the policy; None: all gradients are kept.
        keep: Share that is kept; None where there is no such option.
    """

    way: Way
    form: Form | None = None
    keep: float | None = None


def make_row(candidate: Candidate, count: Count, passes: list[Pass], plain: Count, plain_passes: list[Pass]) -> Row:
    """Sum up what was found of one way.

    Args:
        candidate: Which.
        count: Its.
        passes: Its, one a round.
        plain: Of plain PyTorch.
        plain_passes: The same.

    Returns:
        A row of the table.
    """
    way, form = candidate.way, candidate.form
    ratio = ratios(passes, plain_passes, lambda one: one.both)
    highest, realised = bound(count, plain, ratio.median)
    has_peaks = count.peak_bytes is not None and plain.peak_bytes
    note = ""
    if form is not None and form.execution == "csr" and count.backward_flops >= plain.backward_flops:
        note = "ran masked: there is no product in CSR for this dtype here"
    worth = _find_worth(candidate, count, plain, ratio.median)
    return Row(
        site=way.sites or "",
        label=way.label if form is None else form.label,
        execution="dense" if form is None else form.execution,
        keep=candidate.keep,
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
        peak_ratio=round(count.peak_bytes / plain.peak_bytes, 4) if has_peaks else None,  # type: ignore[operator]
        kept_share=None if count.kept_share is None or form is None else round(count.kept_share, 6),
        cost_ratio=round(worth.cost_ratio, 4),
        unit_worth=None if worth.unit_worth is None else round(worth.unit_worth, 4),
        note=note,
        passes=[one.as_dict() for one in passes],
    )


def _find_worth(candidate: Candidate, count: Count, plain: Count, seconds_ratio: float) -> Worth:
    """Return what a pass costs and keeps; its tokens are random, so how unequal gradients are is not known here."""
    ratio = (count.forward_flops + count.backward_flops) / (plain.forward_flops + plain.backward_flops)
    policy = candidate.way.policy
    chooses = isinstance(policy, GradientSelector) and policy.selection is not None
    share = count.kept_share if chooses else None
    return Worth(ratio, seconds_ratio, share, None, {})


def break_evens(forms: Sequence[Form], rows: list[Row]) -> list[BreakEven]:
    """Return the break-even of every form that has a share to keep, and that between two executions of one form.

    Args:
        forms: That were measured.
        rows: What was found; plain PyTorch first.

    Returns:
        In the order of the forms, those against plain PyTorch first.
    """
    found = [_break_even(form, None, rows) for form in forms]
    for one, other in itertools.permutations(forms, 2):
        same = (one.site, one.options) == (other.site, other.options)
        if same and (one.execution, other.execution) in RIVALS:
            found.append(_break_even(one, other, rows))
    return [one for one in found if one is not None]


def _break_even(form: Form, other: Form | None, rows: list[Row]) -> BreakEven | None:
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


def _find(rows: list[Row], form: Form, keep: float | None) -> Row | None:
    return next((row for row in rows if (row.site, row.label, row.keep) == (form.site, form.label, keep)), None)


def _both(seconds: dict[str, float]) -> float:
    return seconds["forward"] + seconds["backward"]
