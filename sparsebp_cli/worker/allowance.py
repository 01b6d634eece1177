"""What a run may spend besides its steps: seconds of training, and work counted in dense steps.

What is spent is kept in checkpoints, so a run that is resumed goes on counting. Steps that were lost after the last
checkpoint and are made again count once, as they do in the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparsebp_cli.recipe.schema import TrainingSection
from sparsebp_cli.run import metric


@dataclass
class Allowance:
    """The limits of a run, and what its steps have spent."""

    max_seconds: float | None
    max_cost: float | None
    seconds: float = 0.0  # of all steps: forward, backward and update, without measurements and checkpoints
    cost: float = 0.0  # in dense steps, by counted FLOPs of forward and backward
    _ratio: float | None = None  # of the policy's FLOPs to dense's, as last counted
    _step_seconds: float = 0.0  # of the last timed step
    _dense: float | None = None  # FLOPs of a dense forward and backward of a micro-batch, as last counted

    @classmethod
    def of(cls, training: TrainingSection) -> Allowance:
        """Return the limits of a recipe, with nothing spent."""
        return cls(training.max_seconds, training.max_cost)

    def count(self, values: Mapping[str, float | None]) -> None:
        """Read what a step costs from the metrics of a probe; others are ignored. It holds until the next probe."""
        if (ratio := values.get(metric.CHOICE_COST.name)) is not None:  # that of the probe before the first step
            self._ratio = ratio
        forward, executed, dense = (
            values.get(one.name) for one in (metric.FORWARD_FLOPS, metric.BACKWARD_EXECUTED, metric.BACKWARD_DENSE)
        )
        if forward is not None and executed is not None and dense is not None:
            scoring = values.get(metric.SCORING_FLOPS.name) or 0.0
            self._dense = forward - scoring + dense
            self._ratio = (forward + executed) / self._dense

    def spend(self, seconds: float | None, trial_flops: float = 0.0) -> None:
        """Count a step, and the FLOPs of trial passes before it over the number of its micro-batches. A step whose
        memory was traced has no time of its own and counts as the one before."""
        self._step_seconds = self._step_seconds if seconds is None else seconds
        self.seconds += self._step_seconds
        self.cost += (self._ratio or 0.0) + (trial_flops / self._dense if self._dense else 0.0)

    @property
    def exceeded(self) -> str:
        """The limit that is reached, in one line; empty while none is."""
        if self.max_seconds is not None and self.seconds >= self.max_seconds:
            return f"training.max_seconds: {self.max_seconds:g} is reached, with {self.seconds:.4g} s of steps"
        if self.max_cost is not None and self.cost >= self.max_cost - 1e-9:
            return f"training.max_cost: {self.max_cost:g} is reached, with the work of {self.cost:.4g} dense steps"
        return ""

    def state_dict(self) -> dict[str, float | None]:
        """Return what is spent of the limits that are set, for a checkpoint. Seconds differ from run to run, and
        without a limit a resumed run has the same checkpoints, to the bit, as one without a stop."""
        state: dict[str, float | None] = {}
        if self.max_seconds is not None:
            state |= {"seconds": self.seconds, "step_seconds": self._step_seconds}
        if self.max_cost is not None:
            state |= {"cost": self.cost, "ratio": self._ratio, "dense": self._dense}
        return state

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Go on from what was spent when a checkpoint was made."""
        self.seconds, self.cost = state.get("seconds") or 0.0, state.get("cost") or 0.0
        self._ratio, self._dense = state.get("ratio"), state.get("dense")
        self._step_seconds = state.get("step_seconds") or 0.0
