"""Records of ``worth``."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer, Number


class Interval(Answer):
    """A value with its 95 % interval."""

    value: Number
    """The value."""
    low: Number
    """Low end."""
    high: Number
    """High end."""


class PolicyWorth(Answer):
    """Cost and approximation error of a policy before training."""

    name: str
    """Name and options."""
    verdict: str
    """``dense``, ``cannot beat a smaller batch``, ``could`` or ``decide by training``."""
    price: Interval
    """Cost of a step, in dense steps."""
    noise: Interval
    """Variance of the policy's draws over the variance of dense gradients between batches, all directions weighted
    equally.
    """
    noise_curved: Interval | None
    """The same variance weighted by the curvature of the loss, that is, by its cost in a step. Null if weights or
    passes have 16 bits, or if the loss is not curved upwards between batches.
    """
    rate: Interval | None
    """Fraction of the learning rate that remains, relative to dense with ``dense_batch_curved`` examples: variance in
    any direction shortens Adam's steps. Null without second moments or ``noise_curved``.
    """
    bias: Interval
    """Squared bias, all directions weighted equally."""
    product: Interval
    """(1 + noise) x cost, with ``noise_curved`` unless it is null. Above 1, dense with a smaller batch has the same
    variance and costs less.
    """
    product_all_directions: Interval
    """The same product with ``noise``."""
    dense_batch: Number
    """Batch size, in examples, at which dense has the same variance."""
    dense_batch_curved: Number | None
    """The same batch size by ``noise_curved``."""
    remembers: bool
    """Whether its choices depend on earlier steps."""
    as_at_step: int | None
    """Step whose settings were measured instead, if the policy leaves nothing out as early as the measured steps."""
    noise_plain: Interval
    """Variance of plain gradients, whatever the metric."""
    by_part: dict[str, dict[str, Number]]
    """``noise`` and ``bias`` by part of the model."""


class NotMeasured(Answer):
    """A policy that was not measured."""

    name: str
    """Name and options."""
    why: str
    """Reason."""


class WorthAnswer(Answer):
    """Cost and approximation error of policies before training."""

    recipe: str
    """Name of the recipe."""
    steps: list[int]
    """Steps of a dense training at which policies were measured."""
    batch: int
    """Examples in a step."""
    batches: int
    """Number of small batches that were measured."""
    examples: int
    """Examples in a small batch."""
    metric: str
    """``adam``: in AdamW's metric; ``plain``: of plain gradients."""
    dense_step_flops: float
    """FLOPs of a dense step."""
    policies: list[PolicyWorth]
    """Policies, the recipe's first."""
    left_out: list[NotMeasured]
    """Policies that cannot be measured."""
