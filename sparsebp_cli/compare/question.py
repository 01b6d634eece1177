"""Define the options of a comparison, and derive their defaults from the runs: baseline, metric, labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.run import State
from sparsebp_cli.run import metric as names
from sparsebp_cli.run.metric import METRICS, Metric, find_known

Way = Literal["lower", "higher", ""]


FEWEST_DIGITS = 4

# Metrics read once, after the last step, and their counterparts that are evaluated during training.
COURSES = {
    names.TEST_LOSS.name: names.EVAL_LOSS.name,
    names.TEST_ACCURACY.name: names.EVAL_ACCURACY.name,
    names.TEST_MACRO_F1.name: names.EVAL_MACRO_F1.name,
    names.TEST_MCC.name: names.EVAL_MCC.name,
    names.TEST_F1.name: names.EVAL_F1.name,
}

Members = Mapping[str, Sequence[LoadedRun]]


@dataclass(frozen=True)
class Question:
    """The options of a comparison."""

    # name, group hash or run id of the baseline; None: the first dense group, else the first group with only exact
    # policies, else the first group
    baseline: str | None = None
    # the quality metric; None: the loss (for classification the accuracy), on the test split if every finished run has
    # it, else on validation
    metric: str | None = None
    # in the metric's unit, by how much a worse result still counts as not worse; None: no such statement
    margin: float | None = None
    curves: tuple[str, ...] = ()  # additional metrics whose curves are needed
    better: Way = ""  # the better direction of the metric; empty: as the metric declares it
    # for a study: run name to the standard error of its tuned values, in the metric's unit, by metric
    choice: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tuned_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # run name to the variants that tuned it
    is_complete: bool = True  # whether all planned runs exist; without them there is no statement on quality


def find_baseline(members: Members, wanted: str | None, labels: Mapping[str, str]) -> str:
    if wanted is None:
        dense = find_dense(members)
        whole = [group for group in dense if any(run.state is State.FINISHED for run in members[group])]
        exact = [group for group, some in members.items() if any(run.exact for run in some)]
        return next(iter([*whole, *dense, *exact, *members]))
    for group, some in members.items():
        if wanted in {group, labels[group], *(run.run_id for run in some)}:
            return group
    named = [group for group, some in members.items() if any(run.name == wanted for run in some)]
    if len(named) > 1:
        choices = ", ".join(labels[group] for group in named)
        raise UsageError(
            f"--baseline {wanted!r} names {len(named)} groups with different recipes: name one of {choices}"
        )
    if named:
        return named[0]
    matching = [g for g, some in members.items() if any(x.startswith(wanted) for x in (g, *(r.run_id for r in some)))]
    if len(matching) == 1 and wanted:
        return matching[0]
    known = [*dict.fromkeys(run.name for some in members.values() for run in some)]
    near = did_you_mean(wanted, known)
    raise UsageError(f"--baseline must name one of the runs compared ({', '.join(known)}), got {wanted!r}{near}")


def find_dense(members: Members) -> list[str]:
    """Return the groups that train without a policy."""
    return [group for group, some in members.items() if any(run.is_dense for run in some)]


def find_course(metric: str, declared: Collection[str] = ()) -> str:
    """Return the metric that is evaluated during training: for a test metric the validation's. ``declared`` are the
    names that runs declared, for both splits."""
    if metric in declared and metric.startswith("test/"):
        return f"eval/{metric.removeprefix('test/')}"
    return COURSES.get(metric, metric)


def find_declared(runs: Iterable[LoadedRun], metric: str) -> Metric | None:
    """Return a metric of SparseBP, or one that runs declared when they measured it; None if unknown. Raise
    ``UsageError`` if two runs declared different directions."""
    declared = [run.history.facts.get("metrics", {}) for run in runs]
    ways = sorted({one[metric]["better"] for one in declared if metric in one})
    if len(ways) > 1 and metric not in METRICS:
        raise UsageError(
            f"some of these runs declare that {metric} is better when {ways[0]}, others when {ways[1]}: compare them "
            "separately"
        )
    return find_known(metric, declared)


def choose_metric(runs: Sequence[LoadedRun], question: Question) -> str:
    if question.metric is not None:
        check_logged(runs, question.metric, "--metric")
        return question.metric
    wanted = {run.flat.get("measure.metric") for run in runs}
    classify = all(run.flat.get("dataset.format") == "classification" for run in runs)
    scored = any(names.EVAL_ACCURACY.name in run.history.metrics for run in runs)
    usual = names.EVAL_ACCURACY if classify and scored else names.EVAL_LOSS
    # The metric that all recipes name for judging.
    named = next(iter(wanted)) if len(wanted) == 1 else None
    held_out = named if isinstance(named, str) else usual.name
    test = held_out.replace("eval/", "test/", 1)
    finished = [run for run in runs if run.finished]
    is_tested = bool(finished) and all(test in run.history.metrics for run in finished)
    return test if is_tested else held_out


def choose_way(question: Question, metric: str, known: Metric | None = None) -> Way:
    """Return the better direction of the metric: from its declaration ``known``, else from the user's option; empty if
    unknown. Raise ``UsageError`` if the option contradicts a declaration, or a question needs a direction."""
    ours = known.better if known is not None else ""
    if ours and question.better and question.better != ours:
        raise UsageError(f"--better must be {ours} for {metric}, got {question.better!r}")
    way = question.better or ours
    if question.margin is not None and not way:
        raise UsageError(f"--margin: cannot tell from {metric!r} if higher is better: add --better lower or higher")
    return way


def check_logged(runs: Sequence[LoadedRun], name: str, option: str) -> None:
    logged = sorted({name for run in runs for name in run.history.metrics})
    if name not in logged:
        shown = ", ".join(name for name in logged if name.startswith(("eval/", "train/"))) or "none yet"
        near = did_you_mean(name, logged)
        raise UsageError(f"{option} must be a metric that these runs logged ({shown}, ...), got {name!r}{near}")


def label_groups(members: Members) -> dict[str, str]:
    """Return the labels of groups: the run's name, with as many digits of the group's hash as make it unique."""
    plain = {group: some[0].name for group, some in members.items()}
    uses = Counter(plain.values())
    for digits in range(FEWEST_DIGITS, max(map(len, members)) + 1):
        found = {group: name if uses[name] == 1 else f"{name}#{group[:digits]}" for group, name in plain.items()}
        if len(set(found.values())) == len(found):
            break
    return found
