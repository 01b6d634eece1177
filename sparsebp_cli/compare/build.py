"""Builds a comparison from run folders."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from sparsebp_cli.compare.comparison import SCHEMA, Change, Comparison, Group, RunLine
from sparsebp_cli.compare.confound import find_confounds, find_warnings
from sparsebp_cli.compare.figure import measure_cost, measure_quality, measure_speed, step_time, training_seconds
from sparsebp_cli.compare.load import LoadedRun, load
from sparsebp_cli.compare.verdict import better, give_verdict
from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.recipe import describe_changes
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run import metric as names

NOT_A_CHANGE = ("name", "training.seed", "tracking.")

Members = Mapping[str, Sequence[LoadedRun]]


def compare_runs(
    runs: Iterable[RunFolder], *, baseline: str | None = None, metric: str | None = None, margin: float | None = None
) -> Comparison:
    """Compare runs: those that differ only in seed form a group, and each group is held against the baseline.

    Args:
        runs: Any runs, in the order in which groups are to be shown.
        baseline: Name, group hash or run id of the baseline; None takes the first group whose policies are all
            exact, else the first group.
        metric: The quality metric; None takes ``eval/accuracy`` for classification, else ``eval/loss``.
        margin: In the metric's unit, how much worse still counts as not worse; None makes no such statement.

    Returns:
        Everything that is shown, as plain data.

    Raises:
        UsageError: There are no runs, or the baseline or the metric is not among theirs.
    """
    loaded = load(runs)
    if not loaded:
        raise UsageError("there are no runs to compare")
    members: dict[str, list[LoadedRun]] = {}
    for run in loaded:
        members.setdefault(run.group, []).append(run)
    first = _find_baseline(members, baseline)
    members = {first: members[first]} | members
    metric = _choose_metric(loaded, metric)
    labels = _label(members)
    counted = {group: [run for run in some if not _why_not(run, metric)] for group, some in members.items()}
    seconds = _equal_time(counted)
    groups = tuple(_measure(group, members, counted, labels, metric, margin, seconds) for group in members)
    return Comparison(
        schema=SCHEMA,
        metric=metric,
        unit=names.METRICS[metric].unit if metric in names.METRICS else "",
        better=better(metric),
        margin=margin,
        baseline=first,
        groups=groups,
        runs=tuple(_describe_run(run, labels[run.group], metric) for some in members.values() for run in some),
        confounds=find_confounds({labels[group]: some for group, some in counted.items()}),
        warnings=find_warnings(loaded, groups, metric),
        equal_time_seconds=seconds,
    )


def _find_baseline(members: Members, wanted: str | None) -> str:
    if wanted is None:
        return next((group for group, some in members.items() if any(run.exact for run in some)), next(iter(members)))
    for group, some in members.items():
        ids = [run.run.run_id for run in some]
        if wanted in {group, *ids, *(run.plan.recipe.name for run in some)}:
            return group
    matching = [
        g for g, some in members.items() if any(x.startswith(wanted) for x in (g, *(r.run.run_id for r in some)))
    ]
    if len(matching) == 1 and wanted:
        return matching[0]
    known = [*dict.fromkeys(run.plan.recipe.name for some in members.values() for run in some)]
    near = did_you_mean(wanted, known)
    raise UsageError(f"--baseline must name one of the runs compared ({', '.join(known)}), got {wanted!r}{near}")


def _choose_metric(runs: Sequence[LoadedRun], wanted: str | None) -> str:
    logged = sorted({name for run in runs for name in run.history.metrics})
    if wanted is not None:
        if wanted not in logged:
            shown = ", ".join(name for name in logged if name.startswith(("eval/", "train/"))) or "none yet"
            near = did_you_mean(wanted, logged)
            raise UsageError(f"--metric must be one that these runs logged ({shown}, ...), got {wanted!r}{near}")
        return wanted
    classify = all(run.plan.recipe.dataset.format == "classification" for run in runs)
    return names.EVAL_ACCURACY.name if classify and names.EVAL_ACCURACY.name in logged else names.EVAL_LOSS.name


def _label(members: Members) -> dict[str, str]:
    """The recipe's name; where two groups share it, with the first digits of the group's hash."""
    plain = {group: some[0].plan.recipe.name for group, some in members.items()}
    uses = Counter(plain.values())
    return {group: name if uses[name] == 1 else f"{name}#{group[:4]}" for group, name in plain.items()}


def _why_not(run: LoadedRun, metric: str) -> str:
    """Why a run is not in its group's numbers; empty when it is."""
    if not run.finished:
        text = str(run.history.ends[-1].get("text", "")) if run.history.ends and run.state.over else ""
        return f"{run.state}: {text.splitlines()[0]}" if text.strip() else str(run.state)
    value = run.final(metric)
    if value is not None and not math.isfinite(value):
        return f"diverged: {metric} is {value} after the last step"
    return f"a newer run of this seed counts: {run.superseded_by}" if run.superseded_by else ""


def _equal_time(counted: Members) -> float | None:
    """The training time of the fastest group, by its slowest run; None with one group, which has nothing to equal."""
    times = [max(map(training_seconds, some), default=0.0) for some in counted.values()]
    return min(filter(None, times), default=None) if len(times) > 1 else None


def _measure(
    group: str,
    members: Members,
    counted: Members,
    labels: Mapping[str, str],
    metric: str,
    margin: float | None,
    seconds: float | None,
) -> Group:
    first = next(iter(members))
    runs, here, newest = members[group], counted[group], members[group][-1]
    there = counted[first] if group != first else []
    scored = [run for run in here if run.final(metric) is not None]
    scored_there = [run for run in there if run.final(metric) is not None]
    quality, speed = measure_quality(scored, scored_there, metric, seconds), measure_speed(here, there)
    lost = sum(not run.superseded_by and run.state.over for run in runs) - len(here)
    verdict = "baseline" + (f"; {lost} of its runs did not finish" if lost else "") + "."
    if group != first:
        verdict = give_verdict(quality, speed, measure_speed(there, []).step, metric, margin, lost)
    return Group(
        group=group,
        label=labels[group],
        baseline=group == first,
        policies=tuple(entry.name for entry in newest.plan.recipe.policy),
        exact=next((run.exact for run in runs if run.exact is not None), None),
        seeds=tuple(sorted(run.seed for run in here)),
        states=dict(Counter(str(run.state) for run in runs if not run.superseded_by)),
        changes=_changes(members[first][-1], newest),
        quality=quality,
        speed=speed,
        cost=measure_cost(here),
        verdict=verdict,
    )


def _changes(baseline: LoadedRun, other: LoadedRun) -> tuple[Change, ...]:
    listed = describe_changes(baseline.plan.recipe, other.plan.recipe)
    return tuple(Change(*change) for change in listed if not change[0].startswith(NOT_A_CHANGE))


def _describe_run(run: LoadedRun, label: str, metric: str) -> RunLine:
    reason, time, value = _why_not(run, metric), step_time(run), run.final(metric)
    return RunLine(
        run_id=run.run.run_id,
        group=run.group,
        label=label,
        seed=run.seed,
        state=str(run.state),
        counts=not reason,
        reason=reason,
        steps=run.steps,
        attempts=len(run.history.warm),
        quality=value if value is not None and math.isfinite(value) else None,
        step_seconds=time.median if time else None,
        curve=run.curve(metric),
    )
