"""Track what a run's steps may cost: seconds of training, FLOPs, and work in dense steps.

Checkpoints store the amount spent, so a resumed run continues counting. Steps that are repeated after a loss count
once, as in the event log.
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
    flops: float = 0.0  # cost of all steps
    dense_flops: float = 0.0  # cost of dense steps over the same batches
    steps: int = 0  # number of steps with a known cost
    _step_seconds: float = 0.0  # of the last timed step

    @classmethod
    def of(cls, training: TrainingSection) -> Allowance:
        """Return the limits of a recipe, with nothing spent."""
        return cls(training.max_seconds, training.max_cost, training.max_flops)

    @property
    def limits_work(self) -> bool:
        """Whether the cost of the steps decides when the run ends."""
        return self.max_cost is not None or self.max_flops is not None

    @property
    def cost(self) -> float:
        """The cost so far, in multiples of the average dense step over the same batches."""
        return self.flops / self.dense_flops * self.steps if self.dense_flops else 0.0

    def spend(self, seconds: float | None, flops: float | None, dense_flops: float | None) -> None:
        """Count a step and its cost; None where unknown. A step whose peak memory was measured has no valid time and
        counts like the step before."""
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
        """The limit that is reached, in one line; empty if none is."""
        if self.max_seconds is not None and self.seconds >= self.max_seconds:
            return f"training.max_seconds: {self.max_seconds:g} is reached, with {self.seconds:.4g} s of steps"
        # A sum that should reach the limit may end one rounding error below it.
        if self.max_cost is not None and self.cost >= self.max_cost - 1e-9:
            return f"training.max_cost: {self.max_cost:g} is reached, with the work of {self.cost:.4g} dense steps"
        if self.max_flops is not None and self.flops >= self.max_flops * (1.0 - 1e-9):
            return f"training.max_flops: {self.max_flops:g} is reached, with {self.flops:.5g} FLOPs"
        return ""

    def state_dict(self) -> dict[str, float]:
        """Return the amounts spent, for a checkpoint. Include seconds only if they are limited: they differ from run to
        run, and a resumed run's checkpoints must equal those of an uninterrupted run bit for bit."""
        state: dict[str, float] = {"flops": self.flops, "dense_flops": self.dense_flops, "steps": self.steps}
        if self.max_seconds is not None:
            state |= {"seconds": self.seconds, "step_seconds": self._step_seconds}
        return state

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Continue with the amounts in a checkpoint. A checkpoint of an older version has no FLOPs."""
        self.seconds, self._step_seconds = state.get("seconds") or 0.0, state.get("step_seconds") or 0.0
        self.flops, self.dense_flops = state.get("flops") or 0.0, state.get("dense_flops") or 0.0
        self.steps = int(state.get("steps") or 0)
