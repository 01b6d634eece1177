"""What was chosen of the batches before their forward, and what choosing cost."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Self

from torch import Tensor

Number = int | float | Tensor  # tensors stay on their device until somebody reads them


@dataclass(frozen=True, repr=False)
class Chosen:
    """Counts of one or more forwards; two can be added.

    Args:
        targets: Predictions that the labels train; examples, in a classification.
        trained: Of these, those whose loss counts.
        real: Positions that are no padding.
        carried: Of these, those that carry gradient.
        examples: Examples that there was a choice among.
        chosen_examples: Of these, those that were backpropagated.
        scoring_seconds: Wall time of the forwards that were run for scores, the reference model's included.
        scoring_flops: Their FLOPs; 0 unless they ran under :func:`~sparsebp_cli.backward.count_flops`.
    """

    targets: Number = 0
    trained: Number = 0
    real: Number = 0
    carried: Number = 0
    examples: int = 0
    chosen_examples: int = 0
    scoring_seconds: float = 0.0
    scoring_flops: int = 0

    @property
    def trained_share(self) -> float | None:
        """Trained over targets; None without targets. Waits for the device."""
        return float(self.trained) / float(self.targets) if float(self.targets) else None

    @property
    def carried_share(self) -> float | None:
        """Carried over real; None where nobody counted positions. Waits for the device."""
        return float(self.carried) / float(self.real) if float(self.real) else None

    def describe(self) -> str:
        """Return the counts in words, as plain numbers. Waits for the device."""
        trained, carried = self.trained_share, self.carried_share
        parts = (
            []
            if trained is None
            else [f"{int(self.trained):,} of {int(self.targets):,} targets trained ({trained:.2%})"]
        )
        if carried is not None:
            parts.append(f"{int(self.carried):,} of {int(self.real):,} positions carried ({carried:.2%})")
        if self.examples:
            parts.append(f"{self.chosen_examples:,} of {self.examples:,} examples")
        return ", ".join(parts)

    def __repr__(self) -> str:
        """Return all counts as plain numbers. Waits for the device."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = (f"{name}={value.item() if isinstance(value, Tensor) else value}" for name, value in counts.items())
        return f"Chosen({', '.join(plain)})"

    def __add__(self, other: Self) -> Self:
        """Return both together."""
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass
class ChosenCounter:
    """Totals, and what came since they were last taken."""

    total: Chosen | None = None
    untaken: Chosen | None = field(default=None)

    def add(self, chosen: Chosen) -> None:
        """Count one forward."""
        # The first one is added as well, so that the first step after a resume holds as many tensors as any other.
        self.total = (self.total or Chosen()) + chosen
        self.untaken = chosen if self.untaken is None else self.untaken + chosen

    def take(self) -> Chosen | None:
        """Return what came since the last call; None when nothing did."""
        chosen, self.untaken = self.untaken, None
        return chosen
