"""What a policy has to be seen beside: dense, random at the same budget, and dense in the same time.

Published gains have vanished against each of them. What is missing is named, with the command that makes it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any, Literal

from pydantic import ValidationError

from sparsebp_cli.compare.comparison import Control
from sparsebp_cli.compare.figure import median_time
from sparsebp_cli.compare.grid import tidy
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.question import Members
from sparsebp_cli.compare.statistics import Difference
from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import Policy
from sparsebp_cli.policy.discovery import find_policy
from sparsebp_cli.run import metric

NOT_THE_RESULT = ("name", "training.seed", "tracking.", "target.", "checkpoint.", "measure.")
SCHEDULE = ("training.max_steps", "training.warmup_steps")
FASTER = 0.95  # under this share of dense's step time, dense deserves more steps
SAME_TIME = 0.1  # two groups that differ by less than this share took the same time

Entry = dict[str, Any]
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
    _make_once.cache_clear()  # what is installed may have changed
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
    controls = [control("dense", dense, lambda: _run(runs, "policy=dense", "dense", _start_of_dense(members, newest)))]
    drawn = [_control_of(entry) for entry in newest.policies]
    if any(drawn):
        random = _first(others, lambda some: _is_random_at_budget(some[-1], newest, drawn))
        controls.append(control("random", random, lambda: _run_random(runs, drawn)))
    if dense and (steps := _equal_steps(counted[group], counted[dense])):
        equal = _first(others, lambda some: _takes_the_time(some, members[dense], counted[group]))
        change = f"training.max_steps={steps}"
        controls.append(control("equal_time", equal, lambda: _run(members[dense], change, f"dense-{steps}-steps")))
    return controls


def _start_of_dense(members: Members, run: LoadedRun) -> LoadedRun:
    """Of groups that share their dense run, one and the same: it is made once for all of them."""
    return next(some[-1] for some in members.values() if some[-1].policies and _same_but(some[-1], run, ("policy.",)))


def _first(groups: Members, fits: Callable[[Sequence[LoadedRun]], bool]) -> str:
    return next((group for group, runs in groups.items() if runs[-1].policies and fits(runs)), "")


def _same_but(a: LoadedRun, b: LoadedRun, allowed: tuple[str, ...]) -> bool:
    keys = {key for key in a.flat.keys() | b.flat.keys() if a.flat.get(key) != b.flat.get(key)}
    return all(key.startswith((*NOT_THE_RESULT, *allowed)) for key in keys)


UNKNOWN: Entry = {"name": ""}  # the control of a policy that is not installed here


def _control_of(entry: Mapping[str, Any]) -> Entry | None:
    """Return what would choose as much at random; None where nothing does."""
    made = _make(entry)
    if made is None:
        return UNKNOWN
    return None if made.control is None else dict(made.control)


def _make(entry: Mapping[str, Any]) -> Policy | None:
    return _make_once(json.dumps(entry, sort_keys=True))


@cache
def _make_once(text: str) -> Policy | None:
    """Every group is held against every other: the entry points are looked through once a policy, not once a pair."""
    entry = json.loads(text)
    try:
        return find_policy(entry.pop("name")).make(entry)
    except (PolicyError, ValidationError):  # a plugin that is not installed here, or another version of it
        return None


def _is_random_at_budget(random: LoadedRun, run: LoadedRun, drawn: Sequence[Entry | None]) -> bool:
    """The same recipe, and each policy that has a control gave way to it."""
    if len(random.policies) != len(drawn) or not _same_but(random, run, ("policy.",)):
        return False
    wanted = [control or entry for control, entry in zip(drawn, run.policies, strict=True)]
    return all(_has(entry, control) for entry, control in zip(random.policies, wanted, strict=True))


def _has(entry: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a policy has at least these options; those that its recipe leaves out are its defaults."""
    made = _make(entry)
    options = {} if made is None else made.model_dump(mode="json")
    found = {**options, **entry}
    return all(found.get(key) == value for key, value in wanted.items())


def _run_random(runs: Sequence[LoadedRun], drawn: Sequence[Entry | None]) -> str:
    """The command for the control; empty where one of the policies is not installed here."""
    if UNKNOWN in drawn:
        return ""
    wanted = [control or entry for control, entry in zip(drawn, runs[-1].policies, strict=True)]
    given = [{key: value for key, value in entry.items() if value is not None} for entry in wanted]
    return _run(runs, f"policy={json.dumps(given)}", "random")


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


def _run(runs: Sequence[LoadedRun], change: str, word: str, start: LoadedRun | None = None) -> str:
    """The stored recipe of the newest run is the starting point: its file may have changed since, or be elsewhere.

    No printed command writes a file: a name such as ``dense.yaml`` may well be one that the reader has.
    """
    newest = start or runs[-1]
    seeds = ",".join(str(seed) for seed in sorted({run.seed for run in runs if run.seed is not None}))
    name = f"{tidy(newest.name)}-{word}"[:64] if word == "random" else word
    like = shlex.quote(tidy(newest.run_id))
    return f"sparsebp run --like {like} --name {shlex.quote(name)} --set {shlex.quote(change)} --seeds {seeds}"
