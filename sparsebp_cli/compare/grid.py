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


def grids(comparison: Comparison, *, everything: bool = False) -> list[Grid]:
    """Return every table, in the order in which they are read; empty ones are left out.

    Args:
        comparison: What was compared.
        everything: Also what a terminal has no room for: examples of groups that have enough seeds.

    Returns:
        Recipe differences, other differences, quality, controls, speed, cost, runs that do not count.
    """
    tables = [*_changes(comparison), _confounds(comparison), _quality(comparison), _margin(comparison)]
    tables += [
        _examples(comparison, everything),
        _at_equal_time(comparison),
        _reach(comparison),
        _controls(comparison),
        _speed(comparison),
        memory_grid(comparison),
    ]
    tables += [_work(comparison), _left_out(comparison)]
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
    corrected = any(g.quality.difference and g.quality.difference.p_holm is not None for g in comparison.groups)
    rows = []
    for group in comparison.groups:
        q = group.quality
        cells = [group.label, _states(group), show.of_spread(q.final)]
        cells += (
            ["", ""]
            if group.baseline
            else [show.of_difference(q.difference), str(q.difference.n if q.difference else 0)]
        )
        cells += [("" if group.baseline else show.of_p(q.difference))] if corrected else []
        rows.append(tuple(cells))
    which = f", {comparison.better} is better" if comparison.better else ""
    columns = ("group", "runs", comparison.metric, "to baseline", "pairs", *(["p"] if corrected else []))
    title = f"Quality: {comparison.metric}, {comparison.reducer}{which}"
    note = "Mean ± standard deviation (seeds). The difference is paired by seed, with a 95% t interval from 3 seeds up."
    for group in comparison.groups:
        difference = group.quality.difference
        if difference is not None and difference.dropped:
            note += f" {group.label}: in no pair, seed {', '.join(map(str, difference.dropped))}."
    if corrected:
        note += " p: corrected for the number of groups (Holm); each interval stands alone."
    if comparison.reducer == "best":
        note += " The best of many evaluations flatters whoever was evaluated more often."
    return Grid(title, columns, tuple(rows), note, aside=2)


def _margin(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        if decision := group.quality.not_worse:
            p = decision.p if decision.p_holm is None else decision.p_holm
            more = show.NONE if decision.more_seeds is None else f"about {decision.more_seeds}"
            rows.append((group.label, decision.answer, show.of_p_value(p), more if decision.answer[0] == "i" else ""))
    title = "" if comparison.margin is None else f"Not worse by more than {comparison.margin:g}?"
    note = (
        "p: that the true difference is the margin, corrected for the number of groups. More seeds: so many more would "
        "decide with a chance of 80%, were true difference and spread those seen; a dash: more than 200, or unknown."
    )
    return Grid(title, ("group", "answer", "p", "more seeds"), tuple(rows), note, aside=2)


def _at_equal_time(comparison: Comparison) -> Grid:
    if comparison.equal_time_seconds is None:
        return Grid("", (), ())
    rows = []
    for group in comparison.groups:
        own = group.speed.training_seconds
        cells = (show.of_spread(group.quality.at_equal_time), show.scaled(own.mean if own else None, SECONDS))
        rows.append((group.label, *cells))
    after = show.scaled(comparison.equal_time_seconds, SECONDS)
    note = (
        f"The last evaluation inside {after} of training, which every group has had. For a group that trained longer, "
        "the learning rate was then still under way: dense with its own schedule is the fair control."
    )
    return Grid(f"Quality after {after}", ("group", comparison.metric, "its whole training"), tuple(rows), note)


def _examples(comparison: Comparison, everything: bool) -> Grid:
    rows = tuple(
        (group.label, str(e.seed), show.of_difference(e.difference), str(e.difference.n), show.of_share(e.worse_share))
        for group in comparison.groups
        for e in group.quality.examples
        if everything or not (group.quality.difference and group.quality.difference.low is not None)
    )
    columns = ("group", "seed", "loss to baseline", "examples", "of them worse")
    note = (
        "The two trained models of one seed on the same held-out examples, which weigh alike here. The interval is "
        "over examples: it says how sure the difference of these two models is, and nothing about other seeds."
    )
    return Grid("Example by example", columns, rows, note, aside=2)


def _reach(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        if (reach := group.quality.reach) is not None:
            seconds = reach.seconds.mean if reach.seconds else None
            steps = show.of_plain(reach.steps.mean if reach.steps else None)
            cells = (
                f"{reach.reached} of {reach.of}",
                steps,
                show.scaled(seconds, SECONDS),
                show.of_change(reach.ratio),
            )
            rows.append((group.label, *cells))
    columns = ("group", "runs that reached it", "steps", "training time", "time to baseline")
    note = "Means over the runs that reached it, by their first evaluation at or past it; nothing is interpolated."
    title = "" if comparison.target is None else f"Time to {comparison.metric} {comparison.target:g}"
    return Grid(title, columns, tuple(rows), note)


def _controls(comparison: Comparison) -> Grid:
    words = {"dense": "dense", "random": "random, same budget", "equal_time": "dense, same time, own schedule"}
    rows = tuple(
        (c.label, words[c.kind], c.found or "missing", show.of_difference(c.difference) if c.found else show.NONE)
        for c in comparison.controls
    )
    missing = [control for control in comparison.controls if control.command]
    note = f"To the control: {comparison.metric} of the group minus that of the control, paired by seed."
    if missing:
        note += " What is missing is made by: " + "; ".join(dict.fromkeys(c.command for c in missing))
    return Grid("Controls", ("group", "control", "is", "to the control"), rows, note, aside=3)


def _speed(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        s = group.speed
        rows.append(
            (
                group.label,
                show.of_quartiles(s.step, SECONDS),
                show.of_phases([q.median if q else None for q in (s.forward, s.backward, s.optimizer)], s.step),
                "" if group.baseline else show.of_change(s.step_ratio),
                show.of_factor(s.ceiling),
                show.of_share(s.realised_share.median if s.realised_share else None),
            )
        )
    columns = ("group", "step", "fwd + bwd + opt", "to baseline", "ceiling", "realised")
    note = (
        "Step: median [quartiles], without warm-up, evaluation and checkpoints; beside it the medians of forward, "
        "backward and optimizer. To baseline: geometric mean of the ratios of whole steps, paired by seed [95% t "
        "interval on the logarithm]. Ceiling (as a factor) and realised share: of forward and backward, from dense "
        "and policy timed in turn inside each run."
    )
    return Grid("Speed", columns, tuple(rows), note)


def memory_grid(comparison: Comparison) -> Grid:
    """Return the table of memory.

    Args:
        comparison: What was compared.

    Returns:
        The table; without rows when nothing was measured.
    """
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
        (run.run_id, run.label, "" if run.seed is None else str(run.seed), str(run.steps), run.reason)
        for run in comparison.runs
        if not run.counts
    )
    return Grid("Runs that are in no mean", ("run", "group", "seed", "steps", "why"), rows, aside=5)


def _states(group: Group) -> str:
    finished = group.states.get("finished", 0)
    rest = [f"{count} {state}" for state, count in group.states.items() if state != "finished"]
    return ", ".join([str(finished), *rest])


def _word(value: object) -> str:
    return show.NONE if value is None else value if isinstance(value, str) else json.dumps(value)
