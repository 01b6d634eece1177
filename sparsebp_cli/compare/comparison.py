"""What a comparison holds: plain frozen data, from which every output is made and nothing is computed again.

As JSON it is the stable interface to other programs: ``schema`` grows when a field changes its meaning or goes away;
new fields may come without that. The committed JSON schema is ``docs/comparison.schema.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sparsebp_cli.compare.load import Point
from sparsebp_cli.compare.margin import NotWorse
from sparsebp_cli.compare.statistics import Difference, Quartiles, Spread


@dataclass(frozen=True)
class ExampleDifference:
    """Two runs of one seed on the same held-out examples, paired example by example.

    It says how sure the difference between these two trained models is, and nothing about other seeds.

    Args:
        seed: Of both runs.
        difference: Mean loss of the group's model minus that of the baseline's, over examples that weigh alike.
        worse_share: Share of the examples on which the group's model has the larger loss.
    """

    seed: int
    difference: Difference
    worse_share: float


@dataclass(frozen=True)
class Reach:
    """How soon a target was reached, by the first evaluation at or past it.

    Args:
        reached: Runs that reached it.
        of: Runs that count.
        steps: Until then, over those that reached it.
        seconds: Of training until then.
        ratio: Of these seconds to the baseline's, over seeds on which both reached it; None for the baseline.
    """

    reached: int
    of: int
    steps: Spread | None = None
    seconds: Spread | None = None
    ratio: Difference | None = None


@dataclass(frozen=True)
class Quality:
    """How good the trained models are.

    Args:
        final: The metric as the reducer takes it, over the runs that count.
        difference: To the baseline; None for the baseline itself.
        not_worse: Whether it is not worse by more than the margin; None without a margin or a direction.
        at_equal_time: The metric at the last evaluation inside the training time that every group has had.
        examples: Example by example, one entry a shared seed whose runs kept the losses.
        reach: How soon the target was reached; None without one.
    """

    final: Spread | None = None
    difference: Difference | None = None
    not_worse: NotWorse | None = None
    at_equal_time: Spread | None = None
    examples: tuple[ExampleDifference, ...] = ()
    reach: Reach | None = None


@dataclass(frozen=True)
class Speed:
    """How fast steps are. Seconds, over all steps after warm-up of all runs that count.

    Args:
        step: A whole optimizer step.
        forward: Its forward passes.
        backward: Its backward passes.
        optimizer: Clipping and the update.
        tokens_per_second: Throughput.
        training_seconds: Of all steps of a run, those of warm-up as long as the median of the others.
        step_ratio: A run's median step as a multiple of the baseline's, paired by seed; None for the baseline.
        backward_ratio: The same of the backward passes alone.
        ceiling: The largest speed-up of forward and backward that the policy could give.
        realised_share: Share of the saving in time that was realised, from dense and policy timed in turn.
    """

    step: Quartiles | None = None
    forward: Quartiles | None = None
    backward: Quartiles | None = None
    optimizer: Quartiles | None = None
    tokens_per_second: Quartiles | None = None
    training_seconds: Spread | None = None
    step_ratio: Difference | None = None
    backward_ratio: Difference | None = None
    ceiling: float | None = None
    realised_share: Quartiles | None = None


@dataclass(frozen=True)
class Cost:
    """What a step takes beside time, and what became of the gradient.

    Args:
        peak_bytes: Largest over all runs that count.
        peak_of: Where it was read: ``device`` (the allocator of CUDA) or ``process``.
        peak_ratio: A run's peak as a multiple of the baseline's, paired by seed; None for the baseline.
        weight_bytes: Of it, weights.
        gradient_bytes: Gradients.
        optimizer_bytes: Optimizer state.
        saved_bytes: Saved for the backward pass.
        executed_flops: Of one backward pass, counted.
        dense_flops: Of one dense backward pass.
        claimed_flops: What the policy claims to leave; None without a ceiling.
        kept_share: Of the gradient's entries, at the policy's sites.
        cosine: Between the gradient and the dense one.
        relative_error: Norm of their difference over the norm of the dense one.
    """

    peak_bytes: float | None = None
    peak_of: Literal["device", "process", ""] = ""
    peak_ratio: Difference | None = None
    weight_bytes: float | None = None
    gradient_bytes: float | None = None
    optimizer_bytes: float | None = None
    saved_bytes: float | None = None
    executed_flops: float | None = None
    dense_flops: float | None = None
    claimed_flops: float | None = None
    kept_share: float | None = None
    cosine: float | None = None
    relative_error: float | None = None


@dataclass(frozen=True)
class Layers:
    """Figures by layer and step, means over the runs that have them.

    Args:
        steps: At which they were taken.
        names: Of the layers or sites, in the model's order.
        figures: ``kept_share``, ``cosine``, ``relative_error``, ``sign_agreement`` to a row a layer, a cell a step;
            None where nothing was measured. A figure that no run has is absent.
    """

    steps: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    figures: dict[str, tuple[tuple[float | None, ...], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One key of the recipe in which a group differs from the baseline; None where it is absent."""

    key: str
    baseline: Any
    value: Any


@dataclass(frozen=True)
class Control:
    """A run beside which a policy has to be seen before anything is believed.

    Args:
        kind: ``dense`` (the same recipe without the policy), ``random`` (drawn at random at the same budget) or
            ``equal_time`` (dense with its own schedule, as many steps as take the same time).
        group: Hash of the group that needs it.
        label: Of that group.
        found: Label of the group that is it; empty when it is missing.
        difference: The policy's quality minus the control's; None when it is missing.
        command: What makes it; empty when it is there.
    """

    kind: Literal["dense", "random", "equal_time"]
    group: str
    label: str
    found: str = ""
    difference: Difference | None = None
    command: str = ""


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
        states: State to number of runs, superseded ones left out.
        changes: To the baseline's recipe.
        recipe: The resolved recipe of the newest run; of somebody else's run, its parameters.
        quality: See :class:`Quality`.
        speed: See :class:`Speed`.
        cost: See :class:`Cost`.
        layers: See :class:`Layers`.
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
        curves: Metric to [step, tokens, seconds of training, value], thinned to 400 points.
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
        warnings: One line each.
        equal_time_seconds: Training time that every group has had; None when it is not known.
    """

    schema: Literal[2]
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
    warnings: tuple[str, ...]
    equal_time_seconds: float | None
