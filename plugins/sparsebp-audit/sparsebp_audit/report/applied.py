"""Describe what ``sparsebp audit --apply`` did in a training, as numbers and sentences."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import quantiles


@dataclass(frozen=True)
class StepTimes:
    """Durations of the steps of one kind, from the end of one optimizer step to the end of the next.

    Args:
        steps: Number of timed steps, at least 2.
        lower_seconds: First quartile of the durations.
        median_seconds: Median of the durations.
        upper_seconds: Third quartile of the durations.
    """

    steps: int
    lower_seconds: float
    median_seconds: float
    upper_seconds: float

    @classmethod
    def of(cls, seconds: list[float]) -> StepTimes | None:
        """Return the quartiles of durations; None for fewer than two."""
        if len(seconds) < 2:
            return None
        return cls(len(seconds), *quantiles(seconds, n=4, method="inclusive"))

    def describe(self) -> str:
        """Return the median and the quartiles: ``61.2 ms [60.1, 63.0] in 20 steps``."""
        low, mid, high = (1e3 * s for s in (self.lower_seconds, self.median_seconds, self.upper_seconds))
        return f"{mid:.3g} ms [{low:.3g}, {high:.3g}] in {self.steps} steps"


@dataclass(frozen=True)
class Applied:
    """Work left out of a running training, and the duration of its steps with and without it.

    Args:
        model: Class of the packed model; empty if none was packed.
        refusal: Why the plain step is used; empty if rows are left out.
        refused_at: Optimizer step from which the plain step is used again; 0 if no step was packed, or all since.
        packed_steps: Optimizer steps with packed batches.
        batches: Batches of these steps.
        packed_batches: Batches among them from which something was left out.
        positions: Positions of the packed steps' batches, padding included.
        padding: Padding positions that were not computed.
        unread: Positions after an example's last label that were not computed.
        shared: Positions in a prefix that was computed once for several examples.
        head_rows: Rows of the head that were not computed.
        checks: Number of comparisons of the gradient with the plain one.
        error: Largest relative error of these gradients, 2-norm over 2-norm.
        switched_off: Parameters whose ``requires_grad`` was switched off, since no optimizer holds them.
        left_on: Why it was not switched off for others; empty if there are none.
        plain: Plain steps, alternating with the others; None if fewer than two were timed.
        lossless: Steps with less work; None if fewer than two were timed.
    """

    model: str = ""
    refusal: str = ""
    refused_at: int = 0
    packed_steps: int = 0
    batches: int = 0
    packed_batches: int = 0
    positions: int = 0
    padding: int = 0
    unread: int = 0
    shared: int = 0
    head_rows: int = 0
    checks: int = 0
    error: float = 0.0
    switched_off: tuple[str, ...] = ()
    left_on: str = ""
    plain: StepTimes | None = None
    lossless: StepTimes | None = None

    @property
    def headline(self) -> str:
        """Whether lossless packing was applied, in one line."""
        if not self.packed_steps:
            return f"not applied: {self.refusal}"
        steps = f"{self.packed_steps} step{'s' * (self.packed_steps != 1)}"
        if self.refusal:
            return f"applied to {self.model} in {steps}, then switched off at step {self.refused_at}: {self.refusal}"
        return f"applied to {self.model} in {steps}"

    def times(self) -> str:
        """Return the step time with and without, in one line; empty if it was not measured."""
        if self.plain is None or self.lossless is None:
            return ""
        factor = self.plain.median_seconds / self.lossless.median_seconds
        return (
            f"step time, measured in alternating steps: without lossless {self.plain.describe()}, with lossless "
            f"{self.lossless.describe()}: {factor:.2f} times as fast"
        )

    def lines(self) -> list[str]:
        """Return sentences without a full stop, the headline first."""
        found = [self.headline, self.times()]
        if self.packed_batches:
            left = self.padding + self.unread + self.shared
            found.append(
                f"skipped: {left / self.positions:.1%} of the positions ({self.padding:,} padding, {self.unread:,} "
                f"after the last label, {self.shared:,} in a shared prefix) and {self.head_rows / self.positions:.1%} "
                f"of the head's rows, in {self.packed_batches} of {self.batches} batches"
            )
        if self.checks:
            found.append(
                f"gradient compared with the ordinary one {self.checks} time{'s' * (self.checks != 1)}: largest "
                f"relative error {self.error:.1e}"
            )
        if self.switched_off:
            names = ", ".join(self.switched_off)
            found.append(f"requires_grad switched off for parameters that no optimizer holds: {names}")
        if self.left_on:
            found.append(f"gradients of parameters that no optimizer holds are still computed: {self.left_on}")
        return [line for line in found if line]

    @classmethod
    def from_dict(cls, content: dict[str, object]) -> Applied:
        """Return the object for the result of ``dataclasses.asdict``, also after JSON."""
        plain = dict(content)
        for name in ("plain", "lossless"):
            times = plain[name]
            plain[name] = StepTimes(**times) if isinstance(times, dict) else None
        names = plain["switched_off"]
        assert isinstance(names, list | tuple)
        return cls(**(plain | {"switched_off": tuple(names)}))  # type: ignore[arg-type] # as asdict wrote it
