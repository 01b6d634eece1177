"""Define a group's measurements: quality, speed, cost, layers. Plain frozen data, part of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sparsebp_cli.compare.margin import NotWorse
from sparsebp_cli.compare.statistics import Difference, Quartiles, Spread
from sparsebp_cli.run import metric
from sparsebp_cli.run.metric import Metric


@dataclass(frozen=True)
class ExampleDifference:
    """Two runs of one seed on the same held-out examples, paired example by example.

    It describes these two trained models and says nothing about other seeds.

    Args:
        seed: Seed of both runs.
        difference: Mean of ``metric`` of the group's model minus that of the baseline's, over examples of equal weight.
            The interval is over clusters; p is corrected for all such statements of the comparison.
        worse_share: Fraction of the examples on which the group's model is worse.
        clusters: Number of clusters; the examples of one cluster are similar.
        clustered_by: A cluster is a ``document``, or a ``block`` of consecutive examples if documents are unknown or
            too few.
        metric: What is compared: the metric of the comparison if it is a mean over examples, else the ``loss``.
    """

    seed: int
    difference: Difference
    worse_share: float
    clusters: int = 0
    clustered_by: Literal["document", "block"] = "document"
    metric: str = "loss"


@dataclass(frozen=True)
class AtEqual:
    """Two groups after as much work or time as the shorter of the two had, independent of any third group.

    Args:
        other: Label of the group with which this one is compared.
        by: ``cost``, counted in dense steps of this group's batch; or ``time``, seconds of training, if a cost is
            unknown or their models differ.
        amount: Dense steps of this group's batch, or seconds, according to ``by``.
        quality: Metric of this group, at its evaluation near the end of that amount, on shared seeds if there are any.
            None if one of the two was not evaluated in the last tenth, nor up to 5 % later.
        others: Metric of the other group, by the same rule.
        difference: This group's minus the other's, paired by seed.
    """

    other: str
    by: Literal["cost", "time"]
    amount: float
    quality: Spread | None
    others: Spread | None
    difference: Difference | None


@dataclass(frozen=True)
class Unequal:
    """A difference between the training of a group and of the baseline, in steps or in examples a step.

    Args:
        words: Such as ``1000 steps against 500``.
        same_batch: Whether a step of both has as many examples and tokens.
        common_step: The last step at which both were evaluated; None if there is none after the start.
        metric: The metric at that step.
        difference: Metric of the group minus the baseline's at that step, paired by seed; None without such a step.
    """

    words: str
    same_batch: bool = True
    common_step: int | None = None
    metric: str = ""
    difference: Difference | None = None


@dataclass(frozen=True)
class Quality:
    """The quality of the trained models.

    Args:
        final: The metric after the last step, over the runs that count.
        difference: Metric of the group minus the baseline's, paired by seed; None for the baseline itself.
        not_worse: Whether it is not worse by more than the margin; None without a margin or a direction.
        at_equal: Quality at equal cost or time, one entry for each group with which this one is compared.
        unequal: The difference in training from the baseline; None if there is none.
        examples: Example by example, one entry for each shared seed whose runs kept the losses.
    """

    final: Spread | None = None
    difference: Difference | None = None
    not_worse: NotWorse | None = None
    at_equal: tuple[AtEqual, ...] = ()
    unequal: Unequal | None = None
    examples: tuple[ExampleDifference, ...] = ()


@dataclass(frozen=True)
class Busy:
    """Runs whose machine did other work.

    Args:
        runs: Number of such runs among those that count.
        of: Number of runs that count.
        cpu_share: CPU seconds of a step over those that an idle machine gives in its time, the smallest of all runs;
            None if not recorded, or if the device is not a CPU.
        load: Largest median of the load average over the number of CPUs; None if not recorded.
    """

    runs: int
    of: int
    cpu_share: float | None
    load: float | None


CURRENCIES_AGREE = 0.1  # largest relative disagreement between the ratios of two runs in seconds and in FLOPs


@dataclass(frozen=True)
class Speed:
    """Step times in seconds, over all steps after warm-up of all runs that count.

    Times that other work on the machine disturbed are withheld: None, with the reason in ``withheld``. Times that the
    probes of a run took alternately are kept.

    Args:
        step: Seconds of a whole optimizer step.
        forward: Seconds of its forward passes.
        backward: Seconds of its backward passes.
        optimizer: Seconds of clipping and the update.
        tokens_per_second: Tokens of a step over its seconds.
        training_seconds: Seconds of all steps of a run; warm-up steps count as the median of the others.
        step_ratio: A run's median step as a multiple of the baseline's, paired by seed; None for the baseline.
        backward_ratio: The same for the backward passes of a step.
        limit: The largest speed-up of forward and backward over all steps, according to what the policy declares.
        reached: Fraction of the time saving at the limit that was reached, by the time per FLOP in the probes.
        reached_low: The same by the slower quartile of the probes.
        cost: FLOPs of all steps of a run, updates included, as a multiple of the baseline's, paired by seed; 1 for the
            baseline. For older runs the ratio of step costs in probes, without an interval. None if unknown.
        flops: Mean FLOPs of all steps of a run; None for older runs.
        step_cost: FLOPs of a whole step, update included, over those of a dense step on the same batches; controls at
            equal cost are chosen by it. For older runs the ratio that the probes timed, or counted.
        cost_by: Source of the cost: ``steps`` (counted at all steps); for older runs ``probe`` (timed), ``flops``
            (counted at probes), or ``dense`` (the same work was counted); empty if unknown.
        relative_cost: FLOPs of a whole step, update included, over those of a dense step of the baseline; for older
            runs as ``step_cost``, if their models are the same. None if either cost is unknown.
        seconds_ratio: CPU seconds of all steps (on CUDA: seconds) as a multiple of the baseline's, paired by seed.
        busy: Whether the machine did other work; None without a sign of it.
        withheld: Why times of whole steps, or their ratios, are missing; empty if none is withheld.
    """

    step: Quartiles | None = None
    forward: Quartiles | None = None
    backward: Quartiles | None = None
    optimizer: Quartiles | None = None
    tokens_per_second: Quartiles | None = None
    training_seconds: Spread | None = None
    step_ratio: Difference | None = None
    backward_ratio: Difference | None = None
    limit: float | None = None
    reached: float | None = None
    reached_low: float | None = None
    cost: Difference | None = None
    flops: float | None = None
    step_cost: float | None = None
    cost_by: Literal["steps", "probe", "flops", "dense", ""] = ""
    relative_cost: float | None = None
    seconds_ratio: Difference | None = None
    busy: Busy | None = None
    withheld: str = ""

    @property
    def currencies_disagree(self) -> bool:
        """Whether the costs in seconds and in FLOPs differ by more than a tenth."""
        if self.cost is None or self.seconds_ratio is None:
            return False
        return abs(self.seconds_ratio.mean / self.cost.mean - 1.0) > CURRENCIES_AGREE


def _of_runs(how: Literal["largest", "median"], which: Metric) -> float | None:
    """Return a field that :func:`~sparsebp_cli.compare.figure.measure_cost` fills from a metric of all runs."""
    return field(default=None, metadata={"how": how, "metric": which})


@dataclass(frozen=True)
class Cost:
    """The memory and FLOPs of a step, and the fidelity of its gradient.

    Args:
        held_bytes: Bytes that a step holds at its highest moment, the largest of all runs: by CUDA's allocator, else by
            the tensors of a measured step; None if neither was recorded.
        held_ratio: The same for a run as a multiple of the baseline's, paired by seed; None for the baseline.
        peak_bytes: Peak bytes, the largest over all runs that count.
        peak_of: Source of the peak: ``device`` (CUDA's allocator) or ``process``. The process also holds libraries,
            data and memory kept from before, so its peak is not compared.
        weight_bytes: Bytes of the weights.
        gradient_bytes: Bytes of the gradients.
        optimizer_bytes: Bytes of the optimizer's state.
        saved_bytes: Bytes of activations saved for backward.
        executed_flops: FLOPs of one backward pass, counted.
        dense_flops: FLOPs of one dense backward pass.
        claimed_flops: FLOPs that the policy claims to execute; None without a limit.
        kept_share: Kept entries over all entries of the gradient, at the policy's sites.
        cosine: Cosine of the angle between the gradient and the dense one.
        relative_error: Norm of their difference over the norm of the dense one.
        noise_ratio: Squared norm of their difference over the variance of the dense gradient over micro-batches.
    """

    held_bytes: float | None = None
    held_ratio: Difference | None = None
    peak_bytes: float | None = None
    peak_of: Literal["device", "process", ""] = ""
    weight_bytes: float | None = _of_runs("largest", metric.WEIGHT_BYTES)
    gradient_bytes: float | None = _of_runs("largest", metric.GRADIENT_BYTES)
    optimizer_bytes: float | None = _of_runs("largest", metric.OPTIMIZER_BYTES)
    saved_bytes: float | None = _of_runs("largest", metric.SAVED_BYTES)
    executed_flops: float | None = _of_runs("median", metric.BACKWARD_EXECUTED)
    dense_flops: float | None = _of_runs("median", metric.BACKWARD_DENSE)
    claimed_flops: float | None = None
    kept_share: float | None = _of_runs("median", metric.KEPT_SHARE)
    cosine: float | None = _of_runs("median", metric.COSINE)
    relative_error: float | None = _of_runs("median", metric.RELATIVE_ERROR)
    noise_ratio: float | None = _of_runs("median", metric.NOISE_RATIO)


@dataclass(frozen=True)
class Layers:
    """Measurements by layer and step, as means over the runs that have them.

    Args:
        steps: Steps of the measurements.
        names: Names of the layers or sites, in the model's order.
        figures: ``kept_share``, ``cosine``, ``relative_error``, ``sign_agreement``, each with a row per layer and a
            cell per step; None where nothing was measured. A measurement that no run has is absent.
    """

    steps: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    figures: dict[str, tuple[tuple[float | None, ...], ...]] = field(default_factory=dict)
