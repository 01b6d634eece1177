"""The best evaluation of a run so far, by the metric of ``checkpoint.keep_best``: its checkpoint outlives others."""

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

    metric: Metric | None = None  # None keeps nothing
    step: int | None = None  # None before the first evaluation of a trained model
    value: float = math.nan

    @classmethod
    def find(cls, metric: Metric | None, run_folder: Path, last_step: int) -> Self:
        """Return the best evaluation up to the step that a run resumes from; those of later steps are made again."""
        best = cls(metric)
        if metric is not None:
            for step, value in History.load(run_folder).series(metric.name).items():
                if step <= last_step:
                    best.take(step, {metric.name: value})
        return best

    def take(self, step: int, values: Mapping[str, float]) -> bool:
        """Take an evaluation into account, and return whether it is the best so far."""
        value = values.get(self.metric.name, math.nan) if self.metric is not None and step > 0 else math.nan
        if not math.isfinite(value):
            return False
        lower = self.metric is not None and self.metric.better == "lower"
        if self.step is not None and not (value < self.value if lower else value > self.value):
            return False
        self.step, self.value = step, value
        return True
