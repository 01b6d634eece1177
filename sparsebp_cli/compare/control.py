"""What a policy has to be seen beside: dense, random at the same budget, and dense in the same time.

Published gains have vanished against each of them. What is missing is named, with the command that makes it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from sparsebp_cli.compare.comparison import Control
from sparsebp_cli.compare.figure import median_time
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.question import Members
from sparsebp_cli.compare.statistics import Difference
from sparsebp_cli.policy import find_policies
from sparsebp_cli.run import metric

NOT_THE_RESULT = ("name", "training.seed", "tracking.", "target.", "checkpoint.", "measure.")
SCHEDULE = ("training.max_steps", "training.warmup_steps")
RANDOM = "random"  # a policy of this name, or of one that goes on with a dash, draws: a control of its kind
FASTER = 0.95  # under this share of dense's step time, dense deserves more steps
SAME_TIME = 0.1  # two groups that differ by less than this share took the same time

Kind = Literal["dense", "random", "equal_time"]


def find_controls(
    members: Members, counted: Members, labels: Mapping[str, str], compare: Callable[[str, str], Difference | None]
) -> tuple[Control, ...]:
    """Look for the controls of every group whose policies are not exact.

    Args:
        members: Group to all its runs.
        counted: Group to its runs that count.
        labels: Group to what it is called.
        compare: The quality of a group minus that of another.

    Returns:
        One entry a group and control that it needs.
    """
    needing = [g for g, runs in members.items() if runs[-1].policies and all(run.exact is False for run in runs)]
    return tuple(control for group in needing for control in _find(group, members, counted, labels, compare))


def _find(
    group: str,
    members: Members,
    counted: Members,
    labels: Mapping[str, str],
    compare: Callable[[str, str], Difference | None],
) -> list[Control]:
    runs = members[group]
    newest, others = runs[-1], {other: some for other, some in members.items() if other != group}

    def control(kind: Kind, found: str, command: Callable[[], str]) -> Control:
        if found:
            return Control(kind, group, labels[group], labels[found], compare(group, found))
        return Control(kind, group, labels[group], command=command())

    dense = _first(others, lambda some: bool(some[-1].exact) and _same_but(some[-1], newest, ("policy.",)))
    controls = [control("dense", dense, lambda: _run(runs, "policy=dense", "dense"))]
    if not _is_random(newest):
        random = _first(others, lambda some: _is_random_at_budget(some[-1], newest))
        controls.append(control("random", random, lambda: _run_random(runs)))
    if dense and (steps := _equal_steps(counted[group], counted[dense])):
        equal = _first(others, lambda some: _takes_the_time(some, members[dense], counted[group]))
        change = f"training.max_steps={steps}"
        controls.append(control("equal_time", equal, lambda: _run(members[dense], change, "dense-short")))
    return controls


def _first(groups: Members, fits: Callable[[Sequence[LoadedRun]], bool]) -> str:
    return next((group for group, runs in groups.items() if runs[-1].policies and fits(runs)), "")


def _same_but(a: LoadedRun, b: LoadedRun, allowed: tuple[str, ...]) -> bool:
    keys = {key for key in a.flat.keys() | b.flat.keys() if a.flat.get(key) != b.flat.get(key)}
    return all(key.startswith((*NOT_THE_RESULT, *allowed)) for key in keys)


def _is_random(run: LoadedRun) -> bool:
    return all(_draws(entry["name"]) for entry in run.policies)


def _draws(name: str) -> bool:
    return name == RANDOM or name.startswith(f"{RANDOM}-")


def _is_random_at_budget(random: LoadedRun, run: LoadedRun) -> bool:
    """The same recipe, and every option that both policies have is the same: they differ in the choice alone."""
    if not _is_random(random) or len(random.policies) != len(run.policies) or not _same_but(random, run, ("policy.",)):
        return False
    pairs = list(zip(random.policies, run.policies, strict=True))
    shared = [(a, b, (a.keys() & b.keys()) - {"name"}) for a, b in pairs]
    return all(("keep" in a) == ("keep" in b) and all(a[k] == b[k] for k in keys) for a, b, keys in shared)


def _run_random(runs: Sequence[LoadedRun]) -> str:
    """The command for the control; empty where no policy that draws answers the same question."""
    entries = [_random(entry) for entry in runs[-1].policies]
    return "" if None in entries else _run(runs, f"policy={json.dumps(entries)}", "random")


def _random(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    installed = find_policies()
    mine = installed.get(entry["name"])
    same = (p for p in installed.values() if mine and _draws(p.name) and p.kind == mine.kind and p.policy_class)
    found = next(same, None)
    if found is None or found.policy_class is None:
        return None
    return {"name": found.name} | {
        key: value for key, value in entry.items() if key in found.policy_class.model_fields and value is not None
    }


def _equal_steps(runs: Sequence[LoadedRun], dense: Sequence[LoadedRun]) -> int | None:
    """Steps that dense makes in the time of these runs; None when they are not faster, or nothing was timed."""
    step, full = ([time for run in some if (time := median_time(run, metric.STEP_SECONDS))] for some in (runs, dense))
    if not step or not full or median(step) > FASTER * median(full):
        return None
    return max(1, round(runs[0].steps * median(step) / median(full)))


def _takes_the_time(some: Sequence[LoadedRun], dense: Sequence[LoadedRun], counted: Sequence[LoadedRun]) -> bool:
    if not some[-1].exact or some[-1].group == dense[-1].group or not _same_but(some[-1], dense[-1], SCHEDULE):
        return False
    here, there = ([run.training_seconds for run in each if run.finished] for each in (some, counted))
    return bool(here and there) and abs(median(here) / median(there) - 1.0) <= SAME_TIME


def _run(runs: Sequence[LoadedRun], change: str, word: str) -> str:
    """The stored recipe of the newest run is the starting point: its file may have changed since, or be elsewhere."""
    newest = runs[-1]
    seeds = ",".join(str(seed) for seed in sorted({run.seed for run in runs if run.seed is not None}))
    name = f"{newest.name}-{word}"[:64] if word == "random" else word
    show = f"sparsebp show {newest.run_id} -o yaml > {name}.yaml"
    return f"{show} && sparsebp run {name}.yaml --name {name} --set {shlex.quote(change)} --seeds {seeds}"
