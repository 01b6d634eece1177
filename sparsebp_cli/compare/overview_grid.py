"""Make all tables of a comparison as plain text cells, for the terminal, for Markdown and for the report."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.control import WORDS
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.number import BYTES, FLOPS, NONE, SECONDS
from sparsebp_cli.compare.statement import Subject
from sparsebp_cli.compare.statistics import Spread, spread

MOST_CHANGED_GROUPS = 4  # columns in one table of recipe differences


def grids(comparison: Comparison, *, everything: bool = False) -> list[Grid]:
    """Return every table that has rows: differences, quality, controls, speed, cost, excluded
    runs. ``everything`` adds the examples of groups that have enough seeds, which do not fit a
    terminal."""
    tables = [*_changes(comparison), _confounds(comparison), *quality_grids(comparison, everything=everything)]
    spent = _spent(comparison)
    tables += [
        *([spent] if spent.rows else []),
        _speed(comparison),
        _memory(comparison),
        _work(comparison),
    ]
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
    note = "Each of these can explain a difference in results, like a difference of recipes."
    return Grid("Other differences", ("what", "value", "groups"), rows, note, aside=3)


def _speed(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        s = group.speed
        rows.append(
            (
                group.label,
                WITHHELD if s.withheld and s.step is None else show.of_quartiles(s.step, SECONDS),
                show.of_phases([q.median if q else None for q in (s.forward, s.backward, s.optimizer)], s.step),
                "" if group.baseline else WITHHELD if s.withheld else show.of_change(s.step_ratio),
                show.of_factor(s.limit),
                show.of_share(s.reached),
            )
        )
    columns = ("group", "step", "fwd + bwd + opt", "to baseline", "limit", "reached")
    note = (
        "Step: median time [quartiles] without warm-up, evaluation and checkpoints. Then the medians of its phases. "
        "To baseline: geometric mean of the ratios of step times, paired by seed [95% interval on the logarithm, "
        "simultaneous like the interval of quality]. Withheld: the machine was busy, or its speed drifted. Limit: "
        "speed-up of forward and backward over all steps if time falls in proportion to FLOPs. Reached: fraction of "
        "the time saving at this limit. Probes measure it: they time dense and policy alternately."
    )
    bold = find_gains(comparison, comparison.groups, "step time", columns)
    return Grid("Speed", columns, tuple(rows), note, bold=bold)


WITHHELD = "withheld"


def find_gains(
    comparison: Comparison, groups: Sequence[Group], subject: Subject, columns: Sequence[str], name: str = "to baseline"
) -> frozenset[tuple[int, int]]:
    """Return the cells of the column ``name`` that a statement on the subject shows to be a gain."""
    column = columns.index(name)
    return frozenset((row, column) for row, group in enumerate(groups) if comparison.is_gain(group, subject))


def _spent(comparison: Comparison) -> Grid:
    """Return the table of the cost of all steps; without rows if runs did not count each step."""
    rows = [
        (
            group.label,
            show.scaled(s.flops, FLOPS),
            show.of_ratio(s.cost),
            "" if group.baseline else show.of_ratio(s.seconds_ratio),
            "differ" if s.currencies_disagree else "",
        )
        for group in comparison.groups
        if (s := group.speed).flops is not None
    ]
    note = (
        "FLOPs: forward, backward, update and trial passes of all steps, on the run's own batches. Cost: these FLOPs "
        "divided by the baseline's, paired by seed [95% interval]. Step seconds: the same ratio of CPU seconds (on "
        "CUDA: seconds of the clock). Differ: cost and step seconds differ by more than a tenth."
    )
    columns = ("group", "FLOPs", "cost", "step seconds", "FLOPs and seconds")
    return Grid("Cost of all steps", columns, tuple(rows), note)


def _memory(comparison: Comparison) -> Grid:
    rows, shown = [], []
    for group in comparison.groups:
        c = group.cost
        peak = f"{show.scaled(c.peak_bytes, BYTES)}{f' ({c.peak_of})' if c.peak_of else ''}"
        parts = (c.weight_bytes, c.gradient_bytes, c.optimizer_bytes, c.saved_bytes)
        if c.peak_bytes is not None or c.held_bytes is not None or any(part is not None for part in parts):
            change = "" if group.baseline else show.of_change(c.held_ratio)
            held = show.scaled(c.held_bytes, BYTES)
            rows.append((group.label, held, change, *(show.scaled(part, BYTES) for part in parts), peak))
            shown.append(group)
    columns = ("group", "held", "to baseline", "weights", "gradients", "optimizer", "saved", "peak")
    note = (
        "Held: the most memory in a step, counted by CUDA's allocator, or from the tensors of a traced step. To "
        "baseline: the ratio paired by seed, with a simultaneous interval like that of quality. Saved: what autograd "
        "stores between forward and backward, without parameters. Peak: the largest of all runs. The peak of a "
        "process includes libraries, data and older memory, so it is not compared."
    )
    return Grid("Memory", columns, tuple(rows), note, bold=find_gains(comparison, shown, "memory", columns))


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
                show.of_plain(c.noise_ratio),
            )
        )
    columns = ("group", "backward executed", "of dense", "claimed", "kept", "cosine", "rel. error", "of SGD's noise")
    note = (
        "Backward executed: counted FLOPs. Of dense: these divided by the FLOPs of a dense backward. Claimed: the "
        "policy's estimate of this fraction. Kept: fraction of the gradient's entries. Cosine and relative error: "
        "against the dense gradient of the same batch, medians over the steps of all runs. Of SGD's noise: squared "
        "error divided by the variance of the dense gradient over batches. Far below 1, the error disappears in the "
        "noise of training. Far above 1, training with as many steps as dense cannot make up for it."
    )
    return Grid("Backward work and fidelity of the gradient", columns, tuple(rows), note)


def _left_out(comparison: Comparison) -> Grid:
    rows = tuple(
        (run.run_id, run.label, str(run.seed), str(run.steps), run.reason) for run in comparison.runs if not run.counts
    )
    return Grid("Runs that no mean includes", ("run", "group", "seed", "steps", "why"), rows, aside=5)


def _show_value(value: object) -> str:
    return NONE if value is None else value if isinstance(value, str) else json.dumps(value)


def quality_grids(comparison: Comparison, *, everything: bool) -> list[Grid]:
    """Return the tables about quality: quality, margin, examples, equal cost, controls. Some may have
    no rows. ``everything`` adds the examples of groups that have enough seeds."""
    return [
        _quality(comparison),
        _margin(comparison),
        _examples(comparison, everything),
        _at_equal(comparison),
        _controls(comparison),
    ]


def _quality(comparison: Comparison) -> Grid:
    corrected = any(g.quality.difference and g.quality.difference.p_holm is not None for g in comparison.groups)
    rows = []
    for group in comparison.groups:
        q = group.quality
        cells = [group.label, _states(group), show.of_spread(over_shared_seeds(comparison, group))]
        cells += (
            ["", ""]
            if group.baseline
            else [show.of_difference(q.difference), str(q.difference.n if q.difference else 0)]
        )
        cells += [("" if group.baseline else show.of_p(q.difference))] if corrected else []
        rows.append(tuple(cells))
    which = f", {comparison.better} is better" if comparison.better else ""
    columns = ("group", "runs", comparison.metric, "to baseline", "pairs", *(["p"] if corrected else []))
    title = f"Quality: {comparison.metric}{which}"
    note = "Mean ± standard deviation (seeds). The difference is paired by seed, with a 95% interval from 3 seeds up."
    for group in comparison.groups:
        difference = group.quality.difference
        if difference is not None and difference.dropped:
            note += f" {group.label}: no pair for seed {', '.join(map(str, difference.dropped))}."
    if comparison.shared_seeds:
        note += f" Means are over the seeds that the groups share: {', '.join(map(str, comparison.shared_seeds))}."
    if corrected:
        note += f" {_describe_families(comparison)}"
    if comparison.metric == comparison.course and comparison.metric.startswith("eval/"):
        note += " If values were chosen on this split, too, results on it look better than they are."
    bold = find_gains(comparison, comparison.groups, "quality", columns)
    return Grid(title, columns, tuple(rows), note, aside=2, bold=bold)


def over_shared_seeds(comparison: Comparison, group: Group) -> Spread | None:
    """Return a group's mean over the seeds that the groups share, so that the means are comparable."""
    if not comparison.shared_seeds:
        return group.quality.final
    return spread([run.quality for run in comparison.comparable_runs(group) if run.quality is not None])


def _describe_families(comparison: Comparison) -> str:
    counts = ", ".join(f"{family.statements} on {family.name}" for family in comparison.families)
    several = len(comparison.families) > 1
    each = f" in each of these {len(comparison.families)} families" if several else ""
    in_all = f", in all of them together at most {5 * len(comparison.families)}%" if several else ""
    tuned = any(one.quality.difference and one.quality.difference.choice_error for one in comparison.groups)
    values = "" if tuned else " The intervals ignore the uncertainty from tuning: how the recipes' values were chosen."
    return (
        "Intervals to the baseline are simultaneous, and p is corrected (Holm): both cover quality, step time and "
        "memory of all groups. Both use the larger of two spreads: of the group, and of all groups. Tested "
        f"statements: {counts}. The chance that any of them is false is at most 5%{each}{in_all}.{values}"
    )


def _margin(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        if decision := group.quality.not_worse:
            p = decision.p if decision.p_holm is None else decision.p_holm
            more = show.NONE if decision.more_seeds is None else f"about {decision.more_seeds}"
            more = more if decision.answer == "inconclusive" and not decision.withheld else ""
            cells = (decision.answer, show.of_p_value(p), decision.equivalent, decision.anytime, more)
            rows.append((group.label, *cells))
    title = "" if comparison.margin is None else f"{comparison.metric}: not worse by more than {comparison.margin:g}?"
    note = (
        "p: the chance of such a result if the true difference equals the margin, corrected for the number of groups. "
        "Equal within: neither worse nor better by more than the margin. Both answers assume one look at a number of "
        "seeds fixed beforehand. At any look: the first answer if you look after every seed. More seeds: this many "
        "more would decide in one look with a chance of 80%, if the true difference and spread are those seen. A "
        "dash: more than 200, or unknown."
    )
    columns = ("group", "answer", "p", "equal within", "at any look", "more seeds")
    return Grid(title, columns, tuple(rows), note, aside=2)


def _at_equal(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        for entry in group.quality.at_equal:
            amount = f"{entry.amount:.0f} dense steps"
            if entry.by == "time":
                amount = f"{show.scaled(entry.amount, SECONDS)} of training"
            values = (show.of_spread(entry.quality), show.of_spread(entry.others), show.of_difference(entry.difference))
            rows.append((group.label, entry.other, amount, *values))
    note = (
        "Each row compares two groups on the seeds that both have, at the evaluation nearest to the cost of the "
        "cheaper group (up to 10% earlier or 5% later). If a cost is unknown, training time replaces it. At that "
        "evaluation, the learning rate of the more expensive group is not yet at its final value. The control run has "
        "a schedule of that length, so it is fairer."
    )
    if any(row[3] == show.NONE for row in rows):
        note += " A dash: a group was not evaluated near this cost; measure.eval_every sets how often to evaluate."
    metric = comparison.course
    columns = ("group", "against", "after", metric, "of the other", "difference")
    return Grid("At equal cost, pair by pair", columns, tuple(rows), note, aside=3)


def _examples(comparison: Comparison, everything: bool) -> Grid:
    rows = tuple(
        (
            group.label,
            str(e.seed),
            show.of_difference(e.difference),
            f"{e.difference.n} in {e.clusters} {e.clustered_by}s",
            show.of_p(e.difference),
            show.of_share(e.worse_share),
        )
        for group in comparison.groups
        for e in group.quality.examples
        if everything or not (group.quality.difference and group.quality.difference.low is not None)
    )
    metrics = {e.metric for group in comparison.groups for e in group.quality.examples}
    name = metrics.pop() if len(metrics) == 1 else "metric, or loss,"
    columns = ("group", "seed", f"{name} to baseline", "examples", "p", "of them worse")
    note = (
        "Descriptive: each row compares the two models of one seed on the same held-out examples, which count equally. "
        "Neighbours resemble each other, so the interval is over documents, or over blocks of consecutive examples if "
        "documents are unknown or fewer than 10. Only p is corrected for the number of rows of all groups (Holm), the "
        "interval is not. Neither says anything about other seeds."
    )
    return Grid("Example by example", columns, rows, note, aside=2)


def _controls(comparison: Comparison) -> Grid:
    rows = tuple(
        (
            c.label,
            WORDS[c.kind],
            (c.found + (" (best of equal cost)" if c.is_best else "")) if c.found else "missing",
            show.of_factor(c.cost),
            show.of_difference(c.difference) if c.found else show.NONE,
        )
        for c in comparison.controls
    )
    note = (
        f"Cost: the control's divided by the group's; at least 1. To the control: {comparison.metric} of the group "
        f"minus {comparison.metric} of the control, paired by seed."
    )
    commands = tuple(dict.fromkeys(control.command for control in comparison.controls if control.command))
    if commands:
        note += " These commands make the missing controls:"
    return Grid(
        "Controls", ("group", "control", "is", "cost", "to the control"), rows, note, aside=3, commands=commands
    )


def _states(group: Group) -> str:
    finished = group.states.get("finished", 0)
    rest = [f"{count} {state}" for state, count in group.states.items() if state != "finished"]
    return ", ".join([str(finished), *rest])
