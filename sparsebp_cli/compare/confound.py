"""Find differences outside the recipes that could explain a difference in a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from sparsebp_cli.compare.comparison import COMPILATION, Change, Confound, Group
from sparsebp_cli.compare.load import ran_together
from sparsebp_cli.compare.loaded import POLICY_KEY, SEED, LoadedRun, flatten
from sparsebp_cli.compare.whole import whole_median
from sparsebp_cli.run import metric
from sparsebp_cli.run.census import summarise_census

MOST_NOTES = 5
MOST_PAIRS = 100  # pairs that are counted: runs that all ran at once have half the square of their number
TOLERANCE = 1.05  # executed over claimed FLOPs: counts are exact, claims omit small layers


def _fact(name: str) -> Callable[[LoadedRun], object]:
    return lambda run: run.history.facts.get(name)


def _census(run: LoadedRun) -> str | None:
    census: Any = run.history.facts.get("census")
    return summarise_census(census) if census else None


def _machine(name: str) -> Callable[[LoadedRun], object]:
    return lambda run: _joined(environment.get(name) for environment in run.history.environments)


def _package(name: str) -> Callable[[LoadedRun], object]:
    return lambda run: _joined(_packages(environment).get(name) for environment in run.history.environments)


def _packages(environment: Mapping[str, object]) -> Mapping[str, object]:
    """Return the versions of libraries and of packages with policies."""
    parts = (environment.get("packages"), environment.get("plugins"))
    return {name: version for part in parts if isinstance(part, Mapping) for name, version in part.items()}


def _forms(run: LoadedRun) -> str | None:
    """Return the forms in which a run of 0.5 computed selected products, if it timed them; None for other runs."""
    fact = run.history.facts.get("forms")
    return ("; ".join(map(str, fact.get("used", []))) or None) if isinstance(fact, dict) else None


def _variables(environment: Mapping[str, object]) -> str:
    found = environment.get("variables")
    named = [f"{name}={value}" for name, value in found.items()] if isinstance(found, Mapping) else []
    return " ".join(named) or ("none" if found is not None else "")


def _joined(values: Iterable[object]) -> str | None:
    """Join the values of a run; a run resumed elsewhere has several."""
    return ", then ".join(dict.fromkeys(str(value) for value in values if value not in (None, ""))) or None


def _is_compiled(run: LoadedRun) -> str:
    return "yes" if run.flat.get("training.compile") else "no"


SOURCES: dict[str, Callable[[LoadedRun], object]] = {
    "device": _fact("device"),
    "GPU": _machine("gpu"),
    "driver": _machine("driver"),
    "CUDA": _machine("cuda"),
    "target": lambda run: run.flat.get("target.kind"),
    "image": lambda run: run.flat.get("target.image"),
    "CPU": _machine("cpu"),
    "cores": _machine("cores"),
    "threads": _fact("threads"),
    "variables": lambda run: _joined(map(_variables, run.history.environments)),
    COMPILATION: _is_compiled,
    "tokens a step": _fact("tokens_per_step"),
    "dataset digest": _fact("dataset_digest"),
    "data census": _census,
    "training examples": _fact("train_examples"),
    "evaluation examples": _fact("eval_examples"),
    "forms of products": _forms,
    "model class": _fact("model_class"),
    "parameters": _fact("num_parameters"),
    "Python": _machine("python"),
    "platform": _machine("platform"),
    **{name: _package(name) for name in ("torch", "transformers", "accelerate", "peft", "datasets")},
    "SparseBP": lambda run: run.version or None,
    "git commit": lambda run: run.git_sha[:10] or None,
}


HARDWARE = ("device", "GPU", "CPU", "cores", "threads", COMPILATION)


def find_confounds(members: Mapping[str, Sequence[LoadedRun]]) -> tuple[Confound, ...]:
    """Return all properties outside the recipe in which counting runs differ, between groups or within one. ``members``
    maps a group's label to its counting runs. Runs without a value are left out of its entry."""
    found = []
    environments = [
        environment for runs in members.values() for run in runs for environment in run.history.environments
    ]
    plugins = sorted({name for one in environments for name in _packages({"plugins": one.get("plugins")})})
    for name, source in (SOURCES | {name: _package(name) for name in plugins}).items():
        values: dict[str, dict[str, None]] = {}
        for label, runs in members.items():
            for run in runs:
                if (value := source(run)) is not None:
                    values.setdefault(str(value), {})[label] = None
        if len(values) > 1:
            found.append(Confound(name, tuple((value, tuple(labels)) for value, labels in values.items())))
    return tuple(found)


def find_hardware(runs: Sequence[LoadedRun], others: Sequence[LoadedRun]) -> tuple[str, ...]:
    """Name the known differences in hardware and compilation between two groups that affect step time."""
    found = []
    for name in HARDWARE:
        here, there = (_values(name, some) for some in (runs, others))
        if here and there and here != there:
            found.append(name)
    return tuple(found)


SOFTWARE = ("torch", "transformers")


def find_sources(runs: Sequence[LoadedRun], others: Sequence[LoadedRun]) -> tuple[str, ...]:
    """Return a sentence on each difference in data, libraries or code that could explain a difference in quality.
    ``others`` are the baseline's runs. Properties that one side does not record are left out."""
    found = []
    digests = [_values("dataset digest", some) for some in (runs, others)]
    if all(digests) and digests[0] != digests[1]:
        found.append("the data differ from the baseline's, which can explain the whole difference")
    for name in SOFTWARE:
        here, there = (_values(name, some) for some in (runs, others))
        if here and there and here != there:
            found.append(f"{name} {', '.join(sorted(here))}, but {', '.join(sorted(there))} in the baseline")
    both = [*runs, *others]
    if dirty := sum(run.dirty for run in both):
        found.append(f"{dirty} of {len(both)} runs had uncommitted changes in the checkout, so their code may differ")
    return tuple(found)


def _values(name: str, runs: Sequence[LoadedRun]) -> set[str]:
    return {str(value) for run in runs if (value := SOURCES[name](run)) is not None}


def find_warnings(runs: Sequence[LoadedRun], groups: Sequence[Group], quality: str) -> tuple[str, ...]:
    """Return the warnings about all runs and the groups' numbers for the metric ``quality``, one line each."""
    lines = [f"run {run.run_id}: {text}" for run in runs if (text := run.history.describe_unreadable())]
    for run in runs:
        for change in run.history.facts.get("changes", []):
            values = f"{change['then']}; from step {change['step']} on: {change['now']}"
            lines.append(f"run {run.run_id} was resumed with an allowed change: {change['field']} ({values})")
    counted = [run for run in runs if run.finished and not run.repeats]
    if changing := [run.run_id for run in counted if run.has_phases]:
        lines.append(f"the policies of {', '.join(changing)} changed during training, so their steps get no medians")
    if pairs := [*islice(ran_together(counted), MOST_PAIRS + 1)]:
        first, second = pairs[0]
        number = f"more than {MOST_PAIRS}" if len(pairs) > MOST_PAIRS else len(pairs)
        lines.append(
            f"{number} pair{'s' * (len(pairs) > 1)} of runs ran at the same time ({first.run_id} and "
            f"{second.run_id}{', ...' * (len(pairs) > 1)}): on one machine, each slows the steps of the other"
        )
    if busy := [group.label for group in groups if group.speed.busy is not None]:
        lines.append(f"the machine was busy while {', '.join(busy)} ran: no statement about their step times")
    for group in groups:
        mine = [run for run in counted if run.group == group.group]
        warnings = _claim_warning(group, mine), _saving_warning(group), _recipe_warning(group)
        lines += [line for line in warnings if line]
    seeds = {group.seeds for group in groups if group.seeds}
    if len(seeds) > 1:
        shown = "; ".join(f"{group.label}: {_listed(group.seeds)}" for group in groups)
        lines.append(
            f"the groups have different seeds ({shown}): a difference uses the seeds that its two groups share, "
            "and a mean uses the seeds that all groups share"
        )
    if any(run.sequential for run in counted):
        lines.append(
            "`run --until-ci` of version 0.5 added seeds until it could decide on a margin. Intervals, and answers "
            "that assume one look, ignore this, so they are too certain"
        )
    if dirty := [run.run_id for run in counted if run.dirty]:
        lines.append(f"uncommitted changes in the checkout were present in {len(dirty)} of {len(counted)} runs")
    lines += [f"{group.label}: no run has {quality} after its last step" for group in groups if _blind(group)]
    return (*lines, *_notes(counted, groups))


def _notes(runs: Sequence[LoadedRun], groups: Sequence[Group]) -> list[str]:
    """Return the runs' own warnings, each text once."""
    labels = {group.group: group.label for group in groups}
    groups_by_text: dict[str, dict[str, None]] = {}
    for run in runs:
        for _, level, text in run.history.notes:
            if level not in {"info", "detail"}:
                groups_by_text.setdefault(text, {})[labels[run.group]] = None
    lines = [f"{', '.join(where)}: {text}" for text, where in groups_by_text.items()]
    more = len(lines) - MOST_NOTES
    return lines if more <= 0 else [*lines[:MOST_NOTES], f"{more} more warnings are in the event logs of the runs"]


def _recipe_warning(group: Group) -> str:
    """Warn if another key of the recipe changed, to which the policy's effect could be due."""
    usual = (POLICY_KEY, "measure.", "checkpoint.", "target.")
    keys = [c.key for c in group.changes if not f"{c.key}.".startswith(usual)]
    if not keys or not any(f"{change.key}.".startswith(POLICY_KEY) for change in group.changes):
        return ""
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"{group.label} differs from the baseline in more than the policy: {', '.join(keys[:3])}{more}"


def _blind(group: Group) -> bool:
    return group.states.get("finished", 0) > 0 and group.quality.final is None


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(str(seed) for seed in seeds) or "none"


def _claim_warning(group: Group, runs: Sequence[LoadedRun]) -> str:
    """Name a policy that claims to skip work and does not. A run's own proof takes precedence over the tolerance."""
    cost = group.cost
    if any(run.values(metric.EXCESS_SHARE.name) for run in runs):
        return _broken_claim(group, [run for run in runs if max(run.values(metric.EXCESS_SHARE.name), default=0) > 0])
    if cost.claimed_flops is None or cost.executed_flops is None or not cost.dense_flops:
        return ""
    claimed, executed = cost.claimed_flops / cost.dense_flops, cost.executed_flops / cost.dense_flops
    if executed <= claimed * TOLERANCE:
        return ""
    what = "skips nothing" if executed > 0.99 else f"executes {executed:.0%}"
    return f"{group.label}: estimates {claimed:.0%} of the dense backward FLOPs, but {what} (counted)"


def _saving_warning(group: Group) -> str:
    """Warn if more time was saved than possible, beyond the spread of the probes: the limit or the clock is wrong."""
    share, low = group.speed.reached, group.speed.reached_low
    if share is None or low is None or low <= 1.0:
        return ""
    return (
        f"{group.label}: its probes saved {share:.0%} of the time that its policy can save, so the speed-up limit "
        "or the time measurement is wrong"
    )


def _broken_claim(group: Group, runs: Sequence[LoadedRun]) -> str:
    if not runs:
        return ""
    claimed, executed = (
        whole_median((run, run.series(which.name)) for run in runs) or 0.0
        for which in (metric.CLAIMED_SHARE, metric.EXECUTED_SHARE)
    )
    chosen = any(flatten(run.recipe).get("backward.execution") == "reference" for run in runs)
    why = "; this is expected, because backward.execution: reference computes every product" if chosen else ""
    return (
        f"{group.label}: estimates {claimed:.1%} of the dense backward FLOPs at its sites, but {executed:.1%} were "
        f"counted{why}"
    )


NOT_A_CHANGE = ("name", "tracking.", SEED)


def find_changes(baseline: LoadedRun, other: LoadedRun) -> tuple[Change, ...]:
    """Return the keys in which two recipes differ, in the order of a recipe, with both values. Names, tracking and
    seeds do not count."""
    a, b = baseline.flat, other.flat
    paths = [path for path in dict.fromkeys([*a, *b]) if a.get(path) != b.get(path)]
    sections = list(dict.fromkeys([*baseline.recipe, *other.recipe]))
    paths.sort(key=lambda path: sections.index(path.split(".")[0]) if path.split(".")[0] in sections else -1)
    # An empty list or section of one recipe that has entries in the other is no key of its own.
    empty = {path for path in paths if [] in (a.get(path), b.get(path)) or {} in (a.get(path), b.get(path))}
    filled = {path for path in empty if any(other.startswith(f"{path}.") for other in paths)}
    shown = [path for path in paths if path not in filled and not path.startswith(NOT_A_CHANGE)]
    return tuple(Change(path, a.get(path), b.get(path)) for path in shown)
