"""Define the data of a comparison: plain frozen dataclasses, from which every output is made without further
computation.

As JSON it is the stable interface to other programs. ``schema`` grows if a field changes its meaning or is removed; new
fields may be added without that. The committed JSON schema is ``docs/comparison.schema.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparsebp_cli.compare.family import Family
from sparsebp_cli.compare.loaded import Point
from sparsebp_cli.compare.measured import Cost, Layers, Quality, Speed
from sparsebp_cli.compare.statement import Statement, Subject
from sparsebp_cli.compare.statistics import Difference


@dataclass(frozen=True)
class Change:
    """One key of the recipe in which a group differs from the baseline; None where it is absent."""

    key: str
    baseline: object
    value: object


Kind = Literal["dense", "random", "fewer_steps", "smaller_batch", "fewer_examples", "by_length", "own_learning_rate"]


@dataclass(frozen=True)
class ControlRuns:
    """The runs that would make a missing control.

    Args:
        like: Id of the run whose recipe they copy.
        name: Name of their recipe.
        changes: Changes to that recipe, as ``--set`` takes them: ``KEY=VALUE``.
        seeds: Their seeds; empty for the recipe's own.
    """

    like: str
    name: str
    changes: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Control:
    """A run with which a policy must be compared before its result can be believed.

    Args:
        kind: ``dense`` (as many steps without the policy), ``random`` (drawn at random at the same budget), or dense at
            the cost of the policy: with ``fewer_steps``, a ``smaller_batch``, ``fewer_examples`` as often, batches
            ``by_length``, or its ``own_learning_rate``.
        group: Hash of the group that needs it.
        label: Label of that group.
        found: Label of the group that is this control; empty if it is missing.
        difference: The policy's quality minus the control's; None if it is missing.
        runs: The runs that would make it; None if it exists, or cannot be made here.
        command: Their command line, for people; empty if there is none.
        cost: Cost of a control at equal cost, as a multiple of the policy's, at least 1; None for other controls.
        is_best: Whether it is the best control of equal cost, on the seeds that it shares with the policy.
    """

    kind: Kind
    group: str
    label: str
    found: str = ""
    difference: Difference | None = None
    runs: ControlRuns | None = None
    command: str = ""
    cost: float | None = None
    is_best: bool = False


@dataclass(frozen=True)
class Group:
    """Runs that differ only in seed.

    Args:
        group: Content hash of what they share.
        label: Name in tables: the recipe's name, made unique.
        baseline: Whether the others are compared with it.
        policies: Names, in the recipe's order.
        exact: Whether every policy is exact; None if no run recorded it and a plug-in is missing.
        seeds: Seeds of the runs that count, in order.
        states: State to number of runs, without repeated runs.
        changes: Differences from the baseline's recipe.
        recipe: The resolved recipe of the newest run.
        quality: See :class:`Quality`.
        speed: See :class:`Speed`.
        cost: See :class:`Cost`.
        layers: See :class:`Layers`.
        statements: Statements about it, the one on quality first. Every output reads these.
        verdict: The statements in words, for people.
    """

    group: str
    label: str
    baseline: bool
    policies: tuple[str, ...]
    exact: bool | None
    seeds: tuple[int, ...]
    states: dict[str, int]
    changes: tuple[Change, ...]
    recipe: dict[str, object]
    quality: Quality
    speed: Speed
    cost: Cost
    layers: Layers
    statements: tuple[Statement, ...]
    verdict: str

    def find(self, subject: Subject) -> Statement | None:
        """Return the first statement on a subject; None if there is none."""
        return next((statement for statement in self.statements if statement.subject == subject), None)


@dataclass(frozen=True)
class Exclusion:
    """Why a run does not count: ``unfinished``, ``diverged``, or ``repeats`` a seed."""

    kind: Literal["unfinished", "diverged", "repeats"]
    text: str  # the reason in one line


@dataclass(frozen=True)
class Sample:
    """A generated text.

    Args:
        step: Number of optimizer steps done before.
        prompt: End of the prompt that the model was given.
        reference: Beginning of the corresponding text in the data.
        prediction: Beginning of the text that the model wrote.
    """

    step: int
    prompt: str
    reference: str
    prediction: str


@dataclass(frozen=True)
class ComparedRun:
    """One run.

    Args:
        run_id: Id of the run, which is also its folder's name.
        group: Hash of its group.
        label: Label of the group.
        seed: Its seed.
        state: Current or final state of the run, such as ``finished``.
        counts: Whether it counts in the group's numbers.
        excluded: Kind of the reason for its exclusion: ``unfinished``, ``diverged``, ``repeats``; empty if it counts.
        reason: The reason in one line; empty if it counts.
        steps: Optimizer steps done.
        attempts: 1 plus the number of times it was resumed.
        created: Time at which the run was made, in seconds since 1970.
        version: Version of the package that made its plan.
        git_sha: Commit of the code that made its plan.
        dirty: Whether the code had uncommitted changes.
        environment: Packages and hardware of its last attempt.
        quality: The metric after the last step; None if it is missing or not finite.
        step_seconds: Median step after warm-up; None if withheld.
        curves: Metric to [step, tokens, seconds of training, value], thinned to at most 400 points.
        samples: Texts that it generated from validation prompts, at its first, middle and last generation.
    """

    run_id: str
    group: str
    label: str
    seed: int
    state: str
    counts: bool
    excluded: Literal["unfinished", "diverged", "repeats", ""]
    reason: str
    steps: int
    attempts: int
    created: float
    version: str
    git_sha: str
    dirty: bool
    environment: dict[str, object]
    quality: float | None
    step_seconds: float | None
    curves: dict[str, tuple[Point, ...]]
    samples: tuple[Sample, ...]


COMPILATION = "torch.compile"  # name of the confound that a run was compiled


@dataclass(frozen=True)
class Confound:
    """A property outside the recipe that differs and could explain a difference.

    Args:
        name: The property that differs, such as a version.
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
        course: The metric that is evaluated during training: the same, or for a test metric the validation's.
        unit: Unit of the metric.
        better: ``lower``, ``higher``, or empty if neither.
        margin: Amount, in the metric's unit, by which a worse result still counts as not worse; None for no such
            statement.
        baseline: Content hash of the baseline group.
        groups: The baseline first, the others in the order of their first runs.
        runs: Every given run.
        controls: The controls that each policy needs, found or missing.
        confounds: See :class:`Confound`.
        families: Statements that are corrected together. The chance of any false one in a family is at most 5%.
        warnings: One line each.
    """

    schema: Literal[6]
    metric: str
    course: str
    unit: str
    better: Literal["lower", "higher", ""]
    margin: float | None
    baseline: str
    groups: tuple[Group, ...]
    runs: tuple[ComparedRun, ...]
    controls: tuple[Control, ...]
    confounds: tuple[Confound, ...]
    families: tuple[Family, ...]
    warnings: tuple[str, ...]

    @property
    def shared_seeds(self) -> tuple[int, ...]:
        """The seeds that all groups share, so that means are comparable; empty if all groups have the same seeds. A
        group without seeds of the baseline is in no pair and is ignored here."""
        base = set(self.groups[0].seeds)
        with_seeds = [set(group.seeds) for group in self.groups if base & set(group.seeds)]
        shared = base.intersection(*with_seeds)
        return () if all(seeds == shared for seeds in with_seeds) else tuple(sorted(shared))

    @property
    def interval_kind(self) -> str:
        """The kind of the intervals of differences to the baseline, in words; empty if there are none."""
        found = [group.quality.difference for group in self.groups if group.quality.difference is not None]
        if any(difference.family_low is not None for difference in found):
            return "simultaneous 95% interval"
        return "95% interval" if any(difference.low is not None for difference in found) else ""

    def is_gain(self, group: Group, subject: Subject) -> bool:
        """Return whether a statement shows a gain of a group over the baseline. All outputs print such numbers bold."""
        statement = group.find(subject)
        return statement is not None and statement.is_gain(self.better if subject == "quality" else "lower")

    def comparable_runs(self, group: Group) -> list[ComparedRun]:
        """Return a group's counting runs with shared seeds; all if none has any, or all groups have the same seeds."""
        mine = [run for run in self.runs if run.group == group.group and run.counts]
        shared = set(self.shared_seeds)
        return [run for run in mine if run.seed in shared] or mine
