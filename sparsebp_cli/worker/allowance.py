"""Track what a run's steps may cost in FLOPs.

Checkpoints store the amount spent, so a resumed run continues counting. Steps that are repeated after a loss count
once, as in the event log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Allowance:
    """The limit of a run, ``training.max_flops``, and what its steps have spent."""

    max_flops: float | None
    flops: float = 0.0  # cost of all steps

    @property
    def limits_work(self) -> bool:
        """Whether the cost of the steps decides when the run ends."""
        return self.max_flops is not None

    def spend(self, flops: float | None) -> None:
        """Count a step's cost; None where unknown."""
        self.flops += flops or 0.0

    @property
    def exceeded(self) -> str:
        """The limit that is reached, in one line; empty if none is."""
        # A sum that should reach the limit may end one rounding error below it.
        if self.max_flops is not None and self.flops >= self.max_flops * (1.0 - 1e-9):
            return f"training.max_flops: {self.flops:.5g} of {self.max_flops:g} FLOPs are used"
        return ""

    def state_dict(self) -> dict[str, float]:
        """Return the amount spent, for a checkpoint."""
        return {"flops": self.flops}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Continue with the amount in a checkpoint. A checkpoint of an older version has no FLOPs."""
        self.flops = state.get("flops") or 0.0
