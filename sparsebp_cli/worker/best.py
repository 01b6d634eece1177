"""Track the best evaluation of a run by the metric of ``checkpoint.keep_best``. Its checkpoint is kept, and a run that
does not improve for long may end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sparsebp_cli.run import History
from sparsebp_cli.run.metric import Metric


@dataclass
class BestEvaluation:
    """The step with the best value; the first of several equal ones."""

    metric: Metric | None = None  # None: nothing is tracked
    step: int | None = None  # None before the first evaluation of a trained model
    value: float = math.nan
    patience: int | None = None  # training.early_stopping_patience
    since: int = 0  # number of evaluations after the best one

    @property
    def end_reason(self) -> str:
        """Why the run ends early, in one line; empty if it does not."""
        if self.patience is None or self.metric is None or self.since < self.patience:
            return ""
        return (
            f"training.early_stopping_patience: {self.patience} evaluations in a row did not improve on "
            f"{self.metric.name} {self.value:.6g} of step {self.step}"
        )

    @classmethod
    def find(cls, metric: Metric | None, run_folder: Path, last_step: int, patience: int | None = None) -> Self:
        """Return the best evaluation up to the step from which a run resumes; later ones will be repeated."""
        best = cls(metric, patience=patience)
        if metric is not None:
            for step, value in History.load(run_folder).series(metric.name).items():
                if step <= last_step:
                    best.take(step, {metric.name: value})
        return best

    def take(self, step: int, values: Mapping[str, float]) -> bool:
        """Record an evaluation, and return whether it is the best so far."""
        if self.metric is None or step == 0 or self.metric.name not in values:
            return False
        value, lower = values[self.metric.name], self.metric.better == "lower"
        is_better = self.step is None or (value < self.value if lower else value > self.value)
        if not (math.isfinite(value) and is_better):
            self.since += 1
            return False
        self.step, self.value, self.since = step, value, 0
        return True
