"""What a comparison holds: plain frozen data, from which every output is made and nothing is computed again.

As JSON it is the stable interface to other programs: ``schema`` grows when a field changes its meaning or goes away;
new fields may come without that. The committed JSON schema is ``docs/comparison.schema.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sparsebp_cli.compare.family import Family
from sparsebp_cli.compare.loaded import Point
from sparsebp_cli.compare.measured import Cost, Layers, Quality, Speed, StepMemory
from sparsebp_cli.compare.statistics import Difference


@dataclass(frozen=True)
class Change:
    """One key of the recipe in which a group differs from the baseline; None where it is absent."""

    key: str
    baseline: Any
    value: Any


Kind = Literal["dense", "random", "fewer_steps", "smaller_batch", "fewer_examples", "own_learning_rate"]


@dataclass(frozen=True)
class Control:
    """A run beside which a policy has to be seen before anything is believed.

    Args:
        kind: ``dense`` (as many steps without the policy), ``random`` (drawn at random at the same budget), or dense
            at the cost of the policy: with ``fewer_steps``, a ``smaller_batch``, ``fewer_examples`` as often, or its
            ``own_learning_rate``.
        group: Hash of the group that needs it.
        label: Of that group.
        found: Label of the group that is it; empty when it is missing.
        difference: The policy's quality minus the control's; None when it is missing.
        command: What makes it; empty when it is there.
        cost: Of the control at equal cost, as a multiple of the policy's, at least 1; None of the others.
        is_best: Whether it is the best of those of equal cost, on the seeds that it shares with the policy.
    """

    kind: Kind
    group: str
    label: str
    found: str = ""
    difference: Difference | None = None
    command: str = ""
    cost: float | None = None
    is_best: bool = False


@dataclass(frozen=True)
class Group:
    """Runs that differ only in seed.

    Args:
        group: Content hash of what they share.
        label: What it is called in tables: the recipe's name, made unique.
        baseline: Whether the others are held against it.
        policies: Names, in the recipe's order.
        exact: Whether every policy is exact; None when no run came far enough to say and a plugin is missing.
        seeds: Those that count, in order.
        states: State to number of runs, repeated ones left out.
        changes: To the baseline's recipe.
        recipe: The resolved recipe of the newest run; of somebody else's run, its parameters.
        quality: See :class:`Quality`.
        speed: See :class:`Speed`.
        cost: See :class:`Cost`.
        layers: See :class:`Layers`.
        memory: Of the last step of the newest run that was watched; None when none was, or only a store has the runs.
        verdict: In words, never stronger than the numbers.
    """

    group: str
    label: str
    baseline: bool
    policies: tuple[str, ...]
    exact: bool | None
    seeds: tuple[int, ...]
    states: dict[str, int]
    changes: tuple[Change, ...]
    recipe: dict[str, Any]
    quality: Quality
    speed: Speed
    cost: Cost
    layers: Layers
    memory: StepMemory | None
    verdict: str


@dataclass(frozen=True)
class RunLine:
    """One run.

    Args:
        run_id: Its id.
        group: Of which it is part.
        label: Of the group.
        seed: Its seed; None when it does not say.
        state: What it is doing, or how it ended.
        counts: Whether it is in the group's numbers.
        reason: Why not, in one line; empty when it counts.
        steps: Optimizer steps done.
        attempts: 1 and the number of times it was resumed.
        created: Seconds since 1970.
        source: Where it was read: empty for its folder, else the store.
        version: Of the package that made its plan.
        git_sha: Commit that it was run from.
        dirty: Whether the code had uncommitted changes.
        environment: Of its last attempt: packages, hardware.
        quality: The metric as the reducer takes it; None when there is none or it is not finite.
        step_seconds: Median step after warm-up.
        curves: Metric to [step, tokens, seconds of training, value], thinned to at most 400 points.
    """

    run_id: str
    group: str
    label: str
    seed: int | None
    state: str
    counts: bool
    reason: str
    steps: int
    attempts: int
    created: float
    source: str
    version: str
    git_sha: str
    dirty: bool
    environment: dict[str, Any]
    quality: float | None
    step_seconds: float | None
    curves: dict[str, tuple[Point, ...]]


@dataclass(frozen=True)
class Confound:
    """Something beside the recipe that differs, and could explain a difference.

    Args:
        name: What.
        values: (value, labels of the groups that have it).
    """

    name: str
    values: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Comparison:
    """Everything that ``compare`` shows.

    Args:
        schema: Version of this structure.
        metric: Name of the quality metric.
        unit: Its unit.
        better: ``lower``, ``higher``, or empty when neither.
        reducer: How a run's evaluations become one number, in words.
        margin: How much worse still counts as not worse; None: no such statement.
        target: Value whose first reaching is looked for; None: none.
        baseline: Content hash of the baseline group.
        groups: The baseline first, the others in the order in which their runs were given.
        runs: Every run that was given.
        controls: What each policy has to be seen beside, found or missing.
        confounds: See :class:`Confound`.
        families: Statements that are corrected together. Any false one in a family has a chance of at most 5%.
        warnings: One line each.
    """

    schema: Literal[3]
    metric: str
    unit: str
    better: Literal["lower", "higher", ""]
    reducer: str
    margin: float | None
    target: float | None
    baseline: str
    groups: tuple[Group, ...]
    runs: tuple[RunLine, ...]
    controls: tuple[Control, ...]
    confounds: tuple[Confound, ...]
    families: tuple[Family, ...]
    warnings: tuple[str, ...]

    @property
    def shared_seeds(self) -> tuple[int, ...]:
        """Seeds that the groups share, where they do not all have the same: means over them are means of one thing.

        A group that shares none with the baseline is in no pair, and does not count here.
        """
        base = set(self.groups[0].seeds)
        with_seeds = [set(group.seeds) for group in self.groups if base & set(group.seeds)]
        shared = base.intersection(*with_seeds)
        return () if all(seeds == shared for seeds in with_seeds) else tuple(sorted(shared))

    def beside(self, group: Group) -> list[RunLine]:
        """Return the runs of a group that count and may stand beside those of other groups.

        Args:
            group: One of the groups.

        Returns:
            Those with shared seeds; all of a group that has no such seed, or where all groups have the same.
        """
        mine = [run for run in self.runs if run.group == group.group and run.counts]
        shared = set(self.shared_seeds)
        return [run for run in mine if run.seed in shared] or mine
