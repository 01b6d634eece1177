"""What a comparison holds: plain frozen data, from which every output is made and nothing is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sparsebp_cli.compare.statistics import Difference, Quartiles, Spread

SCHEMA = 1


@dataclass(frozen=True)
class Quality:
    """How good the trained models are.

    Args:
        final: The metric after the last step, over the seeds that count.
        difference: To the baseline; None for the baseline itself.
        at_equal_time: The metric at the last evaluation inside the training time that every group has had.
    """

    final: Spread | None = None
    difference: Difference | None = None
    at_equal_time: Spread | None = None


@dataclass(frozen=True)
class Speed:
    """How fast steps are. Seconds, over all steps after warm-up of all runs that count.

    Args:
        step: A whole optimizer step.
        forward: Its forward passes.
        backward: Its backward passes.
        optimizer: Clipping and the update.
        tokens_per_second: Throughput.
        speedup: Median step of the baseline over that of this group; None for the baseline.
        speedup_low: The smallest of these ratios, seed by seed; None under two shared seeds.
        speedup_high: The largest.
        ceiling: The largest speed-up of forward and backward that the policy could give.
        realised_share: Share of the saving in time that was realised, from dense and policy timed in turn.
    """

    step: Quartiles | None = None
    forward: Quartiles | None = None
    backward: Quartiles | None = None
    optimizer: Quartiles | None = None
    tokens_per_second: Quartiles | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    ceiling: float | None = None
    realised_share: Quartiles | None = None


@dataclass(frozen=True)
class Cost:
    """What a step takes beside time, and what became of the gradient.

    Args:
        peak_bytes: Largest over all runs that count.
        peak_of: Where it was read: ``device`` (the allocator of CUDA) or ``process``.
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
class Change:
    """One key of the recipe in which a group differs from the baseline; None where it is absent."""

    key: str
    baseline: Any
    value: Any


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
        quality: See :class:`Quality`.
        speed: See :class:`Speed`.
        cost: See :class:`Cost`.
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
    quality: Quality
    speed: Speed
    cost: Cost
    verdict: str


@dataclass(frozen=True)
class RunLine:
    """One run.

    Args:
        run_id: Its id.
        group: Of which it is part.
        label: Of the group.
        seed: Its seed.
        state: What it is doing, or how it ended.
        counts: Whether it is in the group's numbers.
        reason: Why not, in one line; empty when it counts.
        steps: Optimizer steps done.
        attempts: 1 and the number of times it was resumed.
        quality: The metric after its last step; None when there is none or it is not finite.
        step_seconds: Median step after warm-up.
        curve: (step, seconds of training, metric) at each evaluation.
    """

    run_id: str
    group: str
    label: str
    seed: int
    state: str
    counts: bool
    reason: str
    steps: int
    attempts: int
    quality: float | None
    step_seconds: float | None
    curve: tuple[tuple[int, float, float], ...]


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
        margin: How much worse still counts as not worse; None: no such statement.
        baseline: Content hash of the baseline group.
        groups: The baseline first, the others in the order in which their runs were given.
        runs: Every run that was given.
        confounds: See :class:`Confound`.
        warnings: One line each.
        equal_time_seconds: Training time that every group has had; None when it is not known.
    """

    schema: int
    metric: str
    unit: str
    better: str
    margin: float | None
    baseline: str
    groups: tuple[Group, ...]
    runs: tuple[RunLine, ...]
    confounds: tuple[Confound, ...]
    warnings: tuple[str, ...]
    equal_time_seconds: float | None
