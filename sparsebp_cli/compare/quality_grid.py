"""The tables that are about how good the trained models are."""

from __future__ import annotations

from sparsebp_cli.compare import number as show
from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.number import SECONDS


def quality_grids(comparison: Comparison, *, everything: bool) -> list[Grid]:
    """Return the tables about quality, in the order in which they are read; some may be without rows.

    Args:
        comparison: What was compared.
        everything: Also examples of groups that have enough seeds.

    Returns:
        Quality, margin, examples, equal time, time to a target, controls.
    """
    return [
        _quality(comparison),
        _margin(comparison),
        _examples(comparison, everything),
        _at_equal_time(comparison),
        _reach(comparison),
        _controls(comparison),
    ]


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
        f"The last evaluation inside {after} of training (or 5% later), which every group has had. For a group that "
        "trained longer, the learning rate was then still under way: dense with its own schedule is the fair control."
    )
    return Grid(f"Quality after {after}", ("group", comparison.metric, "its whole training"), tuple(rows), note)


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
    note = f"To the control: {comparison.metric} of the group minus that of the control, paired by seed."
    commands = tuple(dict.fromkeys(control.command for control in comparison.controls if control.command))
    if commands:
        note += " What is missing is made by:"
    return Grid("Controls", ("group", "control", "is", "to the control"), rows, note, aside=3, commands=commands)


def _states(group: Group) -> str:
    finished = group.states.get("finished", 0)
    rest = [f"{count} {state}" for state, count in group.states.items() if state != "finished"]
    return ", ".join([str(finished), *rest])
