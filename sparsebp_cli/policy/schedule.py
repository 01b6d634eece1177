"""Schedules: options that change over the training from one value to another along a curve.

A recipe writes a schedule instead of the number, ``keep: {from: 1.0, to: 0.1, over: 0.5, by: cosine}``. Policies need
no code for it: a copy of the policy with the step's values makes each decision.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


class Schedule(BaseModel):
    """An option whose value changes over the training."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True
    )

    start: float = Field(alias="from", description="Value at the first step.")
    to: float = Field(description="Value after the change.")
    over: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="Fraction of the training's steps over which the value changes, in (0, 1]."
    )
    by: Literal["linear", "cosine", "step"] = Field(
        "linear", description="Curve of the change. cosine: flat at both ends. step: at once, after fraction `over`."
    )

    def value(self, index: int, num_steps: int) -> float:
        """Return the value at an optimizer step.

        Args:
            index: Number of the optimizer step, counted from 0.
            num_steps: Optimizer steps of the whole training, at least 1.

        Returns:
            A number between both ends. It equals them exactly at the start and after the change.
        """
        progress = index / (self.over * num_steps)
        if progress >= 1.0:
            return self.to
        if progress <= 0.0 or self.by == "step":
            return self.start
        done = progress if self.by == "linear" else (1.0 - math.cos(math.pi * progress)) / 2.0
        value = self.start + (self.to - self.start) * done
        return min(max(value, min(self.start, self.to)), max(self.start, self.to))  # rounding stays between the ends
