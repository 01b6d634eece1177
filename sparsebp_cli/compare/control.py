"""Find the controls that a policy needs: dense, random at the same budget, and dense at the same cost.

Published gains have vanished against each of them. Dense can spend a cost in several ways: on fewer steps, on smaller
batches, on fewer examples as often, and with its own learning rate. The best existing one counts. A missing control is
reported with the runs that would make it.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from pydantic import ValidationError

from sparsebp_cli.compare.comparison import Control, ControlRuns, Kind
from sparsebp_cli.compare.cost import SAVES, StepCost, count_examples, find_step_cost, find_step_flops, is_near, whole
from sparsebp_cli.compare.example import have_other_examples
from sparsebp_cli.compare.loaded import POLICY_KEY, LoadedRun
from sparsebp_cli.compare.question import Members
from sparsebp_cli.compare.statistics import FEWEST_PAIRS, Difference
from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import Policy
from sparsebp_cli.policy.discovery import find_policy

NOT_THE_RESULT = ("name", "training.seed", "tracking.", "target.", "checkpoint.", "measure.")
# Keys in which a dense control may differ: its data and its cost qualify it as a control.
OWN = (
    POLICY_KEY,
    "backward.",
    "dataset.max_train_examples",
    "training.max_steps",
    "training.warmup_steps",
    "training.learning_rate",
    "training.lr_scheduler_type",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "training.max_grad_norm",
    "training.weight_decay",
    "training.optim_args.",
    "training.max_flops",
    *(CHANGES_BATCH := ("training.group_by",)),
)
EQUAL_COST: tuple[Kind, ...] = ("fewer_steps", "smaller_batch", "fewer_examples", "by_length", "own_learning_rate")
WORDS: dict[Kind, str] = {
    "dense": "dense with as many steps",
    "random": "random at the same budget",
    "fewer_steps": "dense with fewer steps",
    "smaller_batch": "dense with a smaller batch",
    "fewer_examples": "dense with fewer examples",
    "by_length": "dense with batches of similar length",
    "own_learning_rate": "dense with another learning rate",
}

Entry = dict[str, object]


@dataclass(frozen=True)
class ControlSearch:
    """The groups to search for controls, and how to compare them."""

    members: Members  # group to all its runs
    counted: Members  # group to the runs that count
    labels: Mapping[str, str]  # group to its label
    # the quality of a group minus another's, on the seeds that both have
    compare: Callable[[str, str], Difference | None]
    # the same on the split for choices: validation, if there is a test split
    prefer: Callable[[str, str], Difference | None]
    sign: float  # 1.0 if a lower quality is better, -1.0 if a higher one is, 0.0 if unknown

    def control(
        self,
        kind: Kind,
        group: str,
        found: str,
        make: Callable[[], ControlRuns | None],
        cost: float | None = None,
    ) -> Control:
        """Make the entry of a control that was found, or of a missing one with the runs that would make it."""
        label = self.labels[group]
        if found:
            return Control(kind, group, label, self.labels[found], self.compare(group, found), cost=cost)
        runs = make()
        return Control(kind, group, label, runs=runs, command="" if runs is None else write_command(runs))


def write_command(runs: ControlRuns) -> str:
    """Return the command line that makes the runs of a control, for people to copy."""
    given = " ".join(f"--set {shlex.quote(change)}" for change in runs.changes)
    seeds = f" --seeds {','.join(map(str, runs.seeds))}" if runs.seeds else ""
    return f"sparsebp run --like {shlex.quote(runs.like)} --name {shlex.quote(runs.name)} {given}{seeds}"


def find_controls(search: ControlSearch) -> tuple[Control, ...]:
    """Return one entry for each control of each group that has a policy that is not exact."""
    _make_once.cache_clear()  # the installed plug-ins may have changed
    members = search.members
    needing = [g for g, runs in members.items() if all(run.exact is False for run in runs)]
    return tuple(control for group in needing for control in _find(group, search))


def _find(group: str, search: ControlSearch) -> list[Control]:
    runs, newest = search.members[group], search.members[group][-1]
    others = {other: some for other, some in search.members.items() if other != group}
    dense = {other: some for other, some in others.items() if _is_dense_on_the_same(some, runs)}
    plain = _find_plain(dense, newest)
    start = _start_of_dense(search.members, newest)
    controls = [search.control("dense", group, plain, lambda: _run(runs, start, ["policy=dense"], "dense"))]
    drawn = [_control_of(entry) for entry in newest.policies]
    if any(drawn):
        random = next((g for g, some in others.items() if _is_random_at_budget(some[-1], newest, drawn)), "")
        controls.append(search.control("random", group, random, lambda: _run_random(runs, drawn)))
    cost = find_step_cost(search.counted[group])
    if cost is None or cost.dense_steps > SAVES:
        return controls
    return controls + _find_equal(group, search, cost, dense, search.members[plain][-1] if plain else None)


def _find_equal(
    group: str, search: ControlSearch, cost: StepCost, dense: Members, start: LoadedRun | None
) -> list[Control]:
    """Find dense at the same cost, in each way to spend it that this recipe allows."""
    runs, newest = search.members[group], search.members[group][-1]
    found: dict[Kind, list[tuple[str, float]]] = {}
    for other, some in dense.items():
        if (relative := _relative_cost(cost, newest, some, search.counted[other])) is not None:
            found.setdefault(_kind_of(some[-1], newest), []).append((other, relative))
    wanted = _ways(newest, cost)
    controls = []
    for kind in EQUAL_COST:
        if kind in found:
            other, relative = _choose(kind, group, found[kind], search)
            controls.append(search.control(kind, group, other, lambda: None, relative))
        elif kind in wanted:
            changes = [*([] if start else ["policy=dense"]), *wanted[kind]]
            command = partial(_run, runs, start or newest, changes, _name(kind, wanted[kind]))
            controls.append(search.control(kind, group, "", command))
    return _mark_best(group, controls, search)


def _choose(kind: Kind, group: str, found: Sequence[tuple[str, float]], search: ControlSearch) -> tuple[str, float]:
    """Choose the control nearest in cost; among several learning rates the best, as tuning would."""

    def lead(other: str) -> float:
        difference = search.prefer(group, other)
        return -math.inf if difference is None else search.sign * difference.mean

    if kind == "own_learning_rate":
        return max(found, key=lambda pair: lead(pair[0]))
    return min(found, key=lambda pair: (pair[1], -lead(pair[0])))


def _mark_best(group: str, controls: list[Control], search: ControlSearch) -> list[Control]:
    """Mark the control against which the policy looks worst. Prefer controls with enough seeds."""
    groups = {label: other for other, label in search.labels.items()}
    held = [(c, d) for c in controls if c.found and (d := search.prefer(group, groups[c.found])) and d.n > 0]
    held = [(c, d) for c, d in held if d.n >= FEWEST_PAIRS] or held
    if not held or not search.sign:
        return controls
    best, _ = max(held, key=lambda pair: search.sign * pair[1].mean)
    return [replace(c, is_best=c is best) for c in controls]


def _relative_cost(
    cost: StepCost, newest: LoadedRun, some: Sequence[LoadedRun], counted: Sequence[LoadedRun]
) -> float | None:
    """Return the cost of dense runs as a multiple of the policy's; None if it is not near the policy's."""
    steps, num_steps, examples = newest.steps_to_end, some[-1].steps_to_end, count_examples(some[-1])
    if not steps or not num_steps:
        return None
    size = int(some[-1].flat["training.per_device_train_batch_size"])
    own = find_step_flops(counted)
    if cost.counted is not None and own is not None:  # in FLOPs, for any batches
        relative = num_steps * own.flops / (steps * cost.counted.flops)
        if num_steps == steps:
            less = 1.0 - (own.dense_flops - own.dense_update) / own.dense_flops / size
        else:
            less = 1.0 - 1.0 / num_steps
        return relative if is_near(relative, relative * less) else None
    if not _same_but(some[-1], newest, *(key for key in OWN if key not in CHANGES_BATCH)):
        return None
    timed = find_step_cost(counted)  # an exact policy may save too
    if timed is None and any(entry.get("name") != "dense" for entry in some[-1].policies):
        return None
    ratio = 1.0 if timed is None else timed.ratio.median
    relative = cost.relative(steps, examples, num_steps, ratio)
    if num_steps == steps:  # the batch was fitted to the cost, so the next smaller one has one example less
        one_less = cost.relative(steps, examples - examples // size, num_steps, ratio)
    else:
        one_less = cost.relative(steps, examples, num_steps - 1, ratio)
    return relative if is_near(relative, one_less) else None


def _kind_of(dense: LoadedRun, run: LoadedRun) -> Kind:
    """Classify a dense control by how it saves. Check batches by length first, because nothing else makes a step so
    much cheaper; then its own learning rate, because the rest was chosen with it."""
    if dense.flat.get("training.group_by") != run.flat.get("training.group_by"):
        return "by_length"
    if dense.flat.get("training.learning_rate") != run.flat.get("training.learning_rate"):
        return "own_learning_rate"
    if _num_train(dense) < _num_train(run):
        return "fewer_examples"
    return "smaller_batch" if count_examples(dense) < count_examples(run) else "fewer_steps"


def _num_train(run: LoadedRun) -> float:
    value = run.flat.get("dataset.max_train_examples")
    return float(value) if isinstance(value, int) else math.inf


def _ways(run: LoadedRun, cost: StepCost) -> dict[Kind, list[str]]:
    """Return the ways in which dense can spend the cost of a run, each as changes to its recipe."""
    steps, size = run.steps_to_end or 1, int(run.flat["training.per_device_train_batch_size"])
    fewer = whole(steps * cost.dense_steps)
    shorter = [f"training.max_steps={fewer}", *_warmup(run, fewer / steps)]
    ways: dict[Kind, list[str]] = {"fewer_steps": shorter}
    share = (cost.units - cost.update) / cost.examples if cost.counted is None else cost.counted.same_passes
    smaller = math.ceil(share * size - 1e-9)
    if 1 <= smaller < size:
        ways["smaller_batch"] = [f"training.per_device_train_batch_size={smaller}"]
    seen, there = steps * cost.examples, run.history.facts.get("train_examples")
    if isinstance(there, int) and seen > there:  # within the first epoch, fewer steps already mean fewer examples
        ways["fewer_examples"] = [*shorter, f"dataset.max_train_examples={math.ceil(there * fewer / steps)}"]
    rate = float(run.flat.get("training.learning_rate") or 0.0)
    ways["own_learning_rate"] = [*shorter, f"training.learning_rate={2 * rate:g}"]
    return ways


def _warmup(run: LoadedRun, share: float) -> list[str]:
    value = run.flat.get("training.warmup_steps") or 0
    return [f"training.warmup_steps={max(1, round(value * share))}"] if value >= 1 else []  # a fraction still fits


def _name(kind: Kind, changes: Sequence[str]) -> str:
    given = dict(change.split("=", 1) for change in changes)
    match kind:
        case "smaller_batch":
            return f"dense-batch-{given['training.per_device_train_batch_size']}"
        case "fewer_examples":
            return f"dense-{given['dataset.max_train_examples']}-examples"
        case "own_learning_rate":
            return f"dense-{given['training.max_steps']}-steps-lr-{given['training.learning_rate']}"
    return f"dense-{given['training.max_steps']}-steps"


def _is_dense_on_the_same(some: Sequence[LoadedRun], runs: Sequence[LoadedRun]) -> bool:
    """Return whether runs compute the gradient of one model on the same data and evaluate the same examples."""
    here, there = some[-1], runs[-1]
    if not here.exact or not _same_but(here, there, *OWN) or have_other_examples(some, runs):
        return False
    fewer = _num_train(here) != _num_train(there)
    digests = [{str(d) for run in each if (d := run.history.facts.get("dataset_digest"))} for each in (some, runs)]
    return fewer or not all(digests) or bool(digests[0] & digests[1])


def _find_plain(dense: Members, run: LoadedRun) -> str:
    """Find dense with as many steps of as many examples: with the same recipe if it exists, else with other options."""
    equal = [
        group
        for group, some in dense.items()
        if some[-1].steps_to_end == run.steps_to_end
        and count_examples(some[-1]) == count_examples(run)
        and _num_train(some[-1]) == _num_train(run)
    ]
    same = [group for group in equal if _same_but(dense[group][-1], run, POLICY_KEY)]
    return next(iter(same or equal), "")


def _start_of_dense(members: Members, run: LoadedRun) -> LoadedRun:
    """Choose one run for all groups that share a dense control, so that the control is made once."""
    return next(some[-1] for some in members.values() if _same_but(some[-1], run, POLICY_KEY))


def _same_but(a: LoadedRun, b: LoadedRun, *allowed: str) -> bool:
    keys = {key for key in a.flat.keys() | b.flat.keys() if a.flat.get(key) != b.flat.get(key)}
    return all(key.startswith((*NOT_THE_RESULT, *allowed)) for key in keys)


UNKNOWN: Entry = {"name": ""}  # the control of a policy that is not installed here


def _control_of(entry: Mapping[str, object]) -> Entry | None:
    """Return the random control of a policy, which selects as much at random; None if it has no such control."""
    made = _make(entry)
    if made is None:
        return UNKNOWN
    if made.control is None:
        return None
    written = made.model_dump(mode="json")
    return {**made.control, **{name: written[name] for name in made.schedules if name in made.control}}


def _make(entry: Mapping[str, object]) -> Policy | None:
    return _make_once(json.dumps(entry, sort_keys=True))


@cache
def _make_once(text: str) -> Policy | None:
    """Make a policy. Cached, because every group is compared with every other, and searching entry points is slow."""
    entry = json.loads(text)
    try:
        return find_policy(entry.pop("name")).make(entry)
    except (PolicyError, ValidationError):  # the plug-in is missing here, or has another version
        return None


def _is_random_at_budget(random: LoadedRun, run: LoadedRun, drawn: Sequence[Entry | None]) -> bool:
    """Return whether a run has the same recipe with each policy replaced by its random control."""
    if len(random.policies) != len(run.policies) or not _same_but(random, run, POLICY_KEY):
        return False
    wanted = [control or entry for control, entry in zip(drawn, run.policies, strict=True)]
    return all(_has(entry, control) for entry, control in zip(random.policies, wanted, strict=True))


def _has(entry: Mapping[str, object], wanted: Mapping[str, object]) -> bool:
    """Return whether a policy's entry has at least these options. Options that its recipe omits are defaults."""
    made = _make(entry)
    options = {} if made is None else made.model_dump(mode="json")
    found = {**options, **entry}
    return all(found.get(key) == value for key, value in wanted.items())


def _without_unwritten(entry: Mapping[str, object]) -> Entry:
    """Return a policy's entry without what recipes do not write: nulls, and options that are gone."""
    made = _make(entry)
    gone = () if made is None else made.former_options
    return {key: value for key, value in entry.items() if value is not None and (key, value) not in gone}


def _run_random(runs: Sequence[LoadedRun], drawn: Sequence[Entry | None]) -> ControlRuns | None:
    """Return the runs that make the random control; None if one of the policies is not installed here."""
    if UNKNOWN in drawn:
        return None
    wanted = [control or entry for control, entry in zip(drawn, runs[-1].policies, strict=True)]
    given = [_without_unwritten(entry) for entry in wanted]
    return _run(runs, runs[-1], [f"policy={json.dumps(given)}"], f"{runs[-1].name}-random"[:64])


def _run(runs: Sequence[LoadedRun], start: LoadedRun, changes: Sequence[str], name: str) -> ControlRuns:
    """Return the runs that make a control from a run's stored recipe, because its file may have changed or be
    elsewhere. The command writes no file: the user may have one with this name, such as ``dense.yaml``."""
    return ControlRuns(start.run_id, name, tuple(changes), tuple(sorted({run.seed for run in runs})))
