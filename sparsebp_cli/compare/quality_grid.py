"""The tables about the quality of the trained models."""

from __future__ import annotations

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.control import WORDS
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.number import SECONDS
from sparsebp_cli.compare.question import COURSES, find_course
from sparsebp_cli.compare.statistics import Spread, spread


def quality_grids(comparison: Comparison, *, everything: bool) -> list[Grid]:
    """Return the tables about quality: quality, margin, examples, equal cost, time to a target, controls.

    Some may be without rows. ``everything`` adds the examples of groups that have enough seeds.
    """
    return [
        _quality(comparison),
        _margin(comparison),
        _examples(comparison, everything),
        _at_equal(comparison),
        _reach(comparison),
        _controls(comparison),
    ]


def _quality(comparison: Comparison) -> Grid:
    corrected = any(g.quality.difference and g.quality.difference.p_holm is not None for g in comparison.groups)
    rows = []
    for group in comparison.groups:
        q = group.quality
        cells = [group.label, _states(group), show.of_spread(_over_shared_seeds(comparison, group))]
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
    note = "Mean ± standard deviation (seeds). The difference is paired by seed, with a 95% interval from 3 seeds up."
    for group in comparison.groups:
        difference = group.quality.difference
        if difference is not None and difference.dropped:
            note += f" {group.label}: in no pair, seed {', '.join(map(str, difference.dropped))}."
    if comparison.shared_seeds:
        note += f" Means are over the seeds that the groups share: {', '.join(map(str, comparison.shared_seeds))}."
    if corrected:
        note += f" {_describe_families(comparison)}"
    if comparison.metric in COURSES.values():
        note += " One split did both: choices that were made by it are flattered on it."
    if comparison.reducer == "best":
        note += " The best of many evaluations favours runs that were evaluated more often."
    return Grid(title, columns, tuple(rows), note, aside=2)


def _over_shared_seeds(comparison: Comparison, group: Group) -> Spread | None:
    """A group's mean over the seeds that the groups share, so that the means are comparable."""
    if not comparison.shared_seeds:
        return group.quality.final
    return spread([run.quality for run in comparison.comparable_runs(group) if run.quality is not None])


def _describe_families(comparison: Comparison) -> str:
    counts = ", ".join(f"{family.statements} on {family.name}" for family in comparison.families)
    several = len(comparison.families) > 1
    each = f" in each of these {len(comparison.families)} families" if several else ""
    in_all = f", in all of them together at most {5 * len(comparison.families)}%" if several else ""
    return (
        "Intervals to the baseline are simultaneous and p is corrected (Holm), over quality, step time and memory of "
        "all groups; both rest on the larger of a group's own spread and that of all groups. Statements that are "
        f"tested: {counts}. The chance that any of them is false is at most 5%{each}{in_all}."
    )


def _margin(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        if decision := group.quality.not_worse:
            p = decision.p if decision.p_holm is None else decision.p_holm
            more = show.NONE if decision.more_seeds is None else f"about {decision.more_seeds}"
            more = more if decision.answer == "inconclusive" and not decision.withheld else ""
            anytime = decision.answer if decision.looks else decision.anytime
            cells = (decision.answer, show.of_p_value(p), decision.equivalent, anytime, more)
            rows.append((group.label, *cells))
    title = "" if comparison.margin is None else f"Not worse by more than {comparison.margin:g}?"
    note = (
        "p: that the true difference is the margin, corrected for the number of groups. Equal within: neither worse "
        "nor better by more than the margin. Both answers are of one look at a number of seeds that was fixed "
        "beforehand; at any look: the first answer, if one looks again after every seed. More seeds: so many more "
        "would decide in one look with a chance of 80%, were true difference and spread those seen; a dash: more than "
        "200, or unknown."
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
        "Two groups at a time, on the seeds that both have: the evaluation at the cost of the cheaper one (up to 10% "
        "earlier or 5% later); training time where a cost is not known. For the dearer one, the learning rate was then "
        "still under way: dense with its own schedule, among the controls, is the fair one."
    )
    if any(row[3] == show.NONE for row in rows):
        note += " A dash: one of the two was not evaluated near there; measure.eval_every says how often to evaluate."
    metric = find_course(comparison.metric)
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
    columns = ("group", "seed", "loss to baseline", "examples", "p", "of them worse")
    note = (
        "Descriptive: the two trained models of one seed on the same held-out examples, which weigh alike here. The "
        "interval is over documents, or over blocks of consecutive examples where documents are not known or fewer "
        "than 10, because neighbours resemble each other; it stands alone. p is corrected for all rows of all groups "
        "(Holm). Neither says anything about other seeds."
    )
    return Grid("Example by example", columns, rows, note, aside=2)


def _reach(comparison: Comparison) -> Grid:
    rows = []
    for group in comparison.groups:
        if (reach := group.quality.reach) is None:
            continue
        if reach.steps and reach.seconds:
            cells = show.of_plain(reach.steps.mean), show.scaled(reach.seconds.mean, SECONDS)
        elif reach.at_least_steps is None:
            cells = show.NONE, show.NONE
        else:
            cells = (
                f"over {show.of_plain(reach.at_least_steps)}",
                f"over {show.scaled(reach.at_least_seconds, SECONDS)}",
            )
        ratio = "not compared" if reach.censored else show.of_change(reach.ratio)
        rows.append((group.label, f"{reach.reached} of {reach.of}", *cells, "" if group.baseline else ratio))
    columns = ("group", "runs that reached it", "steps", "training time", "time to baseline")
    note = (
        "Means, by the first evaluation at or past it, at the steps at which all runs evaluated, never in between. "
        "Over: some runs never reached it and count as long as they trained, so the true mean is larger. Times are "
        "compared only where every run of both groups reached it: the others would be a choice of winners."
    )
    title = "" if comparison.target is None else f"Time to {comparison.metric} {comparison.target:g}"
    return Grid(title, columns, tuple(rows), note)


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
        f"Cost: of the control over that of the group, at least 1. To the control: {comparison.metric} of the group "
        "minus that of the control, paired by seed."
    )
    commands = tuple(dict.fromkeys(control.command for control in comparison.controls if control.command))
    if commands:
        note += " What is missing is made by:"
    return Grid(
        "Controls", ("group", "control", "is", "cost", "to the control"), rows, note, aside=3, commands=commands
    )


def _states(group: Group) -> str:
    finished = group.states.get("finished", 0)
    rest = [f"{count} {state}" for state, count in group.states.items() if state != "finished"]
    return ", ".join([str(finished), *rest])
