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
    """What a policy is worth before it trains."""

    name: str
    """Name and options."""
    verdict: str
    """``dense``, ``cannot beat a smaller batch``, ``could`` or ``decide by training``."""
    price: Interval
    """Cost of a step in dense steps."""
    noise: Interval
    """Squared error over dense's variance between batches, all directions alike."""
    noise_curved: Interval | None
    """The same with the curvature of the loss between: what an error costs in its step; null where weights or passes
    have 16 bits, or the loss is not curved upwards between batches."""
    rate: Interval | None
    """Share of the learning rate that is left beside the noise, over that of dense with ``dense_batch_curved``
    examples: Adam's steps are shorter by noise in any direction. Null without second moments or ``noise_curved``."""
    bias: Interval
    """Squared bias, all directions alike."""
    product: Interval
    """(1 + noise) x price, with ``noise_curved`` unless that is null: above 1, dense with a smaller batch has as little
    noise and costs less."""
    product_all_directions: Interval
    """The same with ``noise``."""
    dense_batch: Number
    """Examples of the batch with which dense has as much noise."""
    dense_batch_curved: Number | None
    """The same by ``noise_curved``."""
    remembers: bool
    """Whether it chooses by what it remembers of earlier steps."""
    as_at_step: int | None
    """Step as if at which it was measured, where it leaves nothing out so early."""
    noise_plain: Interval
    """Noise in plain gradients, whatever the metric."""
    by_part: dict[str, dict[str, Number]]
    """By part of the model: its ``noise`` and ``bias``."""


class NotMeasured(Answer):
    """A policy that was not measured."""

    name: str
    """Name and options."""
    why: str
    """The reason."""


class WorthAnswer(Answer):
    """What policies are worth before they train."""

    recipe: str
    """Name of the recipe."""
    steps: list[int]
    """Steps of a dense training at which was measured."""
    batch: int
    """Examples of a step."""
    batches: int
    """Small batches that were measured."""
    examples: int
    """Examples of a small batch."""
    metric: str
    """``adam``: in AdamW's metric; ``plain``: of plain gradients."""
    dense_step_flops: float
    """FLOPs of a dense step."""
    policies: list[PolicyWorth]
    """Those of the recipe first."""
    left_out: list[NotMeasured]
    """Those that cannot be measured."""
