"""The tables of a comparison as plain text cells: one source for the terminal and for Markdown."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.number import BYTES, FLOPS, SECONDS

MOST_CHANGED_GROUPS = 4  # side by side in one table of recipe differences


@dataclass(frozen=True)
class Grid:
    """One table.

    Args:
        title: Above it.
        columns: Headings.
        rows: Cells, as many as headings.
        note: Under it; empty for none.
        aside: How many columns, from the left, hold words: the others hold numbers and are aligned right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    aside: int = 1


def grids(comparison: Comparison) -> list[Grid]:
    """Return every table, in the order in which they are read; empty ones are left out.

    Args:
        comparison: What was compared.

    Returns:
        Recipe differences, other differences, quality, speed, cost, runs that do not count.
    """
    tables = [*_changes(comparison), _confounds(comparison), _quality(comparison), _speed(comparison)]
    tables += [_memory(comparison), _work(comparison), _left_out(comparison)]
    return [table for table in tables if table.rows]


def _changes(comparison: Comparison) -> list[Grid]:
    base, *others = comparison.groups
    tables = []
    for start in range(0, len(others), MOST_CHANGED_GROUPS):
        shown = others[start : start + MOST_CHANGED_GROUPS]
        keys = dict.fromkeys(change.key for group in shown for change in group.changes)
        rows = []
        for key in keys:
            found = {g.label: c for g in shown for c in g.changes if c.key == key}
            dense = _word(next(iter(found.values())).baseline)
            rows.append((key, dense, *(_word(found[g.label].value) if g.label in found else dense for g in shown)))
        columns = ("recipe", base.label, *(group.label for group in shown))
        tables.append(Grid("Recipe differences", columns, tuple(rows), aside=len(columns)))
    return tables


def _confounds(comparison: Comparison) -> Grid:
    rows = tuple((c.name, value, ", ".join(labels)) for c in comparison.confounds for value, labels in c.values)
    note = "Any of these can explain a difference as well as the recipe can."
    return Grid("Other differences", ("what", "value", "groups"), rows, note, aside=3)


def _quality(comparison: Comparison) -> Grid:
    rows, timed = [], comparison.equal_time_seconds is not None
    for group in comparison.groups:
        q = group.quality
        rows.append(
            (
                group.label,
                _states(group),
                show.of_spread(q.final),
                show.of_difference(q.difference),
                "" if q.difference is None else str(q.difference.seeds),
                *([show.of_spread(q.at_equal_time)] if timed else []),
            )
        )
    which = f", {comparison.better} is better" if comparison.better else ""
    note = "Mean ± standard deviation (seeds). The difference is paired by seed, with a 95% t interval from 3 seeds up."
    columns: tuple[str, ...] = ("group", "runs", comparison.metric, "to baseline", "pairs")
    if timed:
        columns += (f"at {show.scaled(comparison.equal_time_seconds, SECONDS)}",)
        note += (
            " Last column: the last evaluation inside the training time that every group had; where that is not the "
            "end, the learning rate's schedule was still under way."
        )
    return Grid(f"Quality: {comparison.metric}{which}", columns, tuple(rows), note, aside=2)


def _speed(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        s = group.speed
        like = s.step.median if s.step else None
        phases = (q.median if q else None for q in (s.forward, s.backward, s.optimizer))
        rows.append(
            (
                group.label,
                show.of_quartiles(s.step, SECONDS),
                *(show.scaled(phase, SECONDS, like) for phase in phases),
                "" if group.baseline else show.of_speedup(s.speedup, s.speedup_low, s.speedup_high),
                show.of_factor(s.ceiling),
                show.of_share(s.realised_share.median if s.realised_share else None),
            )
        )
    columns = ("group", "step", "forward", "backward", "optim", "speed-up", "ceiling", "realised")
    note = (
        "Step: median [quartiles] after warm-up. Speed-up: of whole steps [extremes over seeds]. Ceiling and realised "
        "share: of forward and backward, from dense and policy timed in turn inside each run."
    )
    return Grid("Speed", columns, tuple(rows), note)


def _memory(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        c = group.cost
        peak = f"{show.scaled(c.peak_bytes, BYTES)}{f' ({c.peak_of})' if c.peak_of else ''}"
        parts = (c.weight_bytes, c.gradient_bytes, c.optimizer_bytes, c.saved_bytes)
        if c.peak_bytes is not None or any(part is not None for part in parts):
            rows.append((group.label, peak, *(show.scaled(part, BYTES) for part in parts)))
    columns = ("group", "peak", "weights", "gradients", "optimizer", "saved for backward")
    return Grid("Memory", columns, tuple(rows))


def _work(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        c = group.cost
        if c.executed_flops is None and c.kept_share is None:
            continue
        share = c.executed_flops / c.dense_flops if c.executed_flops is not None and c.dense_flops else None
        claimed = c.claimed_flops / c.dense_flops if c.claimed_flops is not None and c.dense_flops else None
        rows.append(
            (
                group.label,
                show.scaled(c.executed_flops, FLOPS),
                show.of_share(share),
                show.of_share(claimed),
                show.of_share(c.kept_share),
                show.of_plain(c.cosine),
                show.of_plain(c.relative_error),
            )
        )
    columns = ("group", "backward executed", "of dense", "claimed", "kept", "cosine", "rel. error")
    return Grid("Backward work and fidelity of the gradient", columns, tuple(rows))


def _left_out(comparison: Comparison) -> Grid:
    rows = tuple(
        (run.run_id, run.label, str(run.seed), str(run.steps), run.reason) for run in comparison.runs if not run.counts
    )
    return Grid("Runs that are in no mean", ("run", "group", "seed", "steps", "why"), rows, aside=5)


def _states(group: Group) -> str:
    return ", ".join(f"{count} {state}" for state, count in group.states.items())


def _word(value: object) -> str:
    return show.NONE if value is None else value if isinstance(value, str) else json.dumps(value)
