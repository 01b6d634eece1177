"""All tables of a comparison as plain text cells, for the terminal, for Markdown and for the report."""

from __future__ import annotations

import json

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import Comparison
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.memory import step_grid
from sparsebp_cli.compare.number import BYTES, FLOPS, NONE, SECONDS
from sparsebp_cli.compare.quality_grid import quality_grids
from sparsebp_cli.plan.selection_gain import HOW_SURE

MOST_CHANGED_GROUPS = 4  # columns in one table of recipe differences


def grids(comparison: Comparison, *, everything: bool = False) -> list[Grid]:
    """Return every table that has rows: differences, quality, controls, speed, cost, the gain of choosing, excluded
    runs.

    ``everything`` adds the examples of groups that have enough seeds, for which a terminal has no room.
    """
    tables = [*_changes(comparison), _confounds(comparison), *quality_grids(comparison, everything=everything)]
    tables += [_speed(comparison), *memory_grids(comparison), _work(comparison), _choice(comparison)]
    tables.append(_left_out(comparison))
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
            dense = _show_value(next(iter(found.values())).baseline)
            rows.append(
                (key, dense, *(_show_value(found[g.label].value) if g.label in found else dense for g in shown))
            )
        columns = ("recipe", base.label, *(group.label for group in shown))
        tables.append(Grid("Recipe differences", columns, tuple(rows), aside=len(columns)))
    return tables


def _confounds(comparison: Comparison) -> Grid:
    rows = tuple((c.name, value, ", ".join(labels)) for c in comparison.confounds for value, labels in c.values)
    note = "Any of these can explain a difference as well as the recipe can."
    return Grid("Other differences", ("what", "value", "groups"), rows, note, aside=3)


def _speed(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        s = group.speed
        rows.append(
            (
                group.label,
                show.of_quartiles(s.step, SECONDS),
                show.of_phases([q.median if q else None for q in (s.forward, s.backward, s.optimizer)], s.step),
                "" if group.baseline else show.of_change(s.step_ratio) + (" busy" if s.busy else ""),
                show.of_cost(s.step_cost),
                show.of_factor(s.ceiling),
                show.of_share(s.realised_share.median if s.realised_share else None),
            )
        )
    columns = ("group", "step", "fwd + bwd + opt", "to baseline", "cost", "ceiling", "realised")
    note = (
        "Step: median [quartiles], without warm-up, evaluation and checkpoints; beside it the medians of forward, "
        "backward and optimizer. To baseline: geometric mean of the ratios of whole steps, paired by seed [95% "
        "interval on the logarithm, simultaneous as that of quality is]; busy: the machine had other work then. Cost: "
        "of a step in dense steps of its batch, by probes inside each run, where dense and policy take turns. Ceiling "
        "(a factor) and realised share: of forward and backward, by the same probes."
    )
    return Grid("Speed", columns, tuple(rows), note)


def memory_grids(comparison: Comparison) -> list[Grid]:
    """Return the memory table of whole runs, without rows when nothing was measured, and that of watched steps, if
    any.
    """
    steps = step_grid([(group.label, group.cost) for group in comparison.groups])
    return [_memory(comparison), *([steps] if steps.rows else [])]


def _memory(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        c = group.cost
        peak = f"{show.scaled(c.peak_bytes, BYTES)}{f' ({c.peak_of})' if c.peak_of else ''}"
        parts = (c.weight_bytes, c.gradient_bytes, c.optimizer_bytes, c.saved_bytes)
        if c.peak_bytes is not None or any(part is not None for part in parts):
            change = "" if group.baseline else show.of_change(c.peak_ratio)
            rows.append((group.label, peak, change, *(show.scaled(part, BYTES) for part in parts)))
    columns = ("group", "peak", "to baseline", "weights", "gradients", "optimizer", "saved")
    note = (
        "Peak: the largest of all runs. Saved: what autograd holds between forward and backward, parameters left out."
    )
    return Grid("Memory", columns, tuple(rows), note)


def _work(comparison: Comparison) -> Grid:
    rows = []
    other = any(group.cost.independent_cosine is not None for group in comparison.groups)
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
                *([show.of_plain(c.independent_cosine), show.of_plain(c.dense_independent_cosine)] if other else []),
            )
        )
    columns = ["group", "backward executed", "of dense", "claimed", "kept", "cosine", "rel. error"]
    note = "Cosine and relative error: to the dense gradient of the same batch, medians over the steps of all runs."
    if other:
        columns += ["cosine, other batch", "of dense, equal cost"]
        note += (
            " Cosine, other batch: with the gradient of a large batch of other examples; beside it that of dense on "
            "the smaller batch that costs as much."
        )
    return Grid("Backward work and fidelity of the gradient", tuple(columns), tuple(rows), note)


def _choice(comparison: Comparison) -> Grid:
    rows = tuple(
        (
            group.label,
            show.of_share(c.cost_ratio),
            show.of_share(c.share),
            show.of_factor(c.unit_worth),
            NONE if not c.unit_worth else f"{1.0 / c.unit_worth:.2f}",
            *(NONE if ess is None else f"{ess:.2f}" for ess in (c.target_ess, c.example_ess, c.row_ess)),
        )
        for group in comparison.groups
        if (c := group.cost.choice) is not None
    )
    columns = ("group", "cost", "trained", "worth", "pays below", "targets", "examples", "rows")
    note = (
        "Medians, measured before the first step. Cost: FLOPs of a step, forward and backward, over dense. Trained: of "
        "the units that the policy chooses among. Worth: how many dense units each of them must be worth, since dense "
        "with that part of the batch costs the same. Targets, examples, rows: effective sample size of the gradients "
        "over their number. Choosing by norm can pay only where that of its units is below the column pays below, and "
        f"gains at most 3 / (1 + 2 x size) over dense at the same cost ({HOW_SURE})."
    )
    return Grid("What choosing could gain", columns, rows, note)


def _left_out(comparison: Comparison) -> Grid:
    rows = tuple(
        (run.run_id, run.label, "" if run.seed is None else str(run.seed), str(run.steps), run.reason)
        for run in comparison.runs
        if not run.counts
    )
    return Grid("Runs that are in no mean", ("run", "group", "seed", "steps", "why"), rows, aside=5)


def _show_value(value: object) -> str:
    return NONE if value is None else value if isinstance(value, str) else json.dumps(value)
