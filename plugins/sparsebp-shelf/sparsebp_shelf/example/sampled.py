"""Share the options of example selectors that are active in a part of the training: start, end and interruptions.

Names and defaults come from Composer's ``SelectiveBackprop``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, NonNegativeInt, model_validator
from typing_extensions import override

from sparsebp_cli.policy import Step
from sparsebp_shelf.example.kept import KeptExamples


class SampledExamples(KeptExamples):
    """Keep a fraction of the examples between two points of the training, except at interruptions."""

    constants: ClassVar[tuple[str, ...]] = ("start", "end")

    start: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.5, description="Fraction of the training's steps after which the selection of examples begins."
    )
    end: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.9, description="Fraction of the training's steps after which the selection of examples ends."
    )
    interrupt: NonNegativeInt = Field(
        2,
        description=(
            "While examples are selected, every N-th step is dense, where N is this number. 0: no step is dense. 1: "
            "every step is dense."
        ),
    )

    @model_validator(mode="after")
    def _has_time(self) -> Self:
        if not self.start < self.end:
            raise ValueError(f"start must be below end, got start {self.start} and end {self.end}")
        return self

    @property
    @override
    def exact(self) -> bool:
        return self.keep == 1.0 or self.interrupt == 1

    @property
    @override
    def needs_num_steps(self) -> bool:
        return not self.exact and (self.start > 0.0 or self.end < 1.0)

    @property
    @override
    def control(self) -> dict[str, object] | None:
        shared = self.model_dump(mode="json", include=set(SampledExamples.model_fields))
        return None if self.exact else {"name": "uniform", **shared}

    def is_choosing(self, step: Step) -> bool:
        """Return whether the policy selects at a step: between start and end, and not at an interruption."""
        if self.exact or (self.interrupt and (step.index + 1) % self.interrupt == 0):
            return False
        if not self.needs_num_steps:
            return True
        assert step.num_steps is not None
        return self.start <= step.index / step.num_steps < self.end
