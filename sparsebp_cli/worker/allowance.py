"""What a run may spend besides its steps: seconds of training, FLOPs, and work counted in dense steps.

What is spent is kept in checkpoints, so a run that is resumed goes on counting. Steps that were lost after the last
checkpoint and are made again count once, as they do in the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparsebp_cli.recipe.schema import TrainingSection


@dataclass
class Allowance:
    """The limits of a run, and what its steps have spent."""

    max_seconds: float | None
    max_cost: float | None
    max_flops: float | None
    seconds: float = 0.0  # of all steps: forward, backward and update, without measurements and checkpoints
    flops: float = 0.0  # of all steps, at their prices
    dense_flops: float = 0.0  # of dense steps over the same batches
    steps: int = 0  # that have a price
    _step_seconds: float = 0.0  # of the last timed step

    @classmethod
    def of(cls, training: TrainingSection) -> Allowance:
        """Return the limits of a recipe, with nothing spent."""
        return cls(training.max_seconds, training.max_cost, training.max_flops)

    @property
    def limits_work(self) -> bool:
        """Whether the price of each step decides where the run ends."""
        return self.max_cost is not None or self.max_flops is not None

    @property
    def cost(self) -> float:
        """What was spent in dense steps of this run's batches, on average over those that it had."""
        return self.flops / self.dense_flops * self.steps if self.dense_flops else 0.0

    def spend(self, seconds: float | None, flops: float | None, dense_flops: float | None) -> None:
        """Count a step and its price; None where that is not known. A step whose memory was traced has no time of its
        own and counts as the one before."""
        self._step_seconds = self._step_seconds if seconds is None else seconds
        self.seconds += self._step_seconds
        if flops is not None and dense_flops is not None:
            self.flops, self.dense_flops, self.steps = (
                self.flops + flops,
                self.dense_flops + dense_flops,
                self.steps + 1,
            )

    @property
    def exceeded(self) -> str:
        """The limit that is reached, in one line; empty while none is."""
        if self.max_seconds is not None and self.seconds >= self.max_seconds:
            return f"training.max_seconds: {self.max_seconds:g} is reached, with {self.seconds:.4g} s of steps"
        # A sum that is meant to reach the limit may end a last bit below it.
        if self.max_cost is not None and self.cost >= self.max_cost - 1e-9:
            return f"training.max_cost: {self.max_cost:g} is reached, with the work of {self.cost:.4g} dense steps"
        if self.max_flops is not None and self.flops >= self.max_flops * (1.0 - 1e-9):
            return f"training.max_flops: {self.max_flops:g} is reached, with {self.flops:.5g} FLOPs"
        return ""

    def state_dict(self) -> dict[str, float]:
        """Return what is spent, for a checkpoint; seconds only with a limit on them. They differ from run to run, and a
        resumed run has the same checkpoints, to the bit, as one without a stop."""
        state: dict[str, float] = {"flops": self.flops, "dense_flops": self.dense_flops, "steps": self.steps}
        if self.max_seconds is not None:
            state |= {"seconds": self.seconds, "step_seconds": self._step_seconds}
        return state

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Go on from what was spent when a checkpoint was made; one of an older version has no FLOPs."""
        self.seconds, self._step_seconds = state.get("seconds") or 0.0, state.get("step_seconds") or 0.0
        self.flops, self.dense_flops = state.get("flops") or 0.0, state.get("dense_flops") or 0.0
        self.steps = int(state.get("steps") or 0)
