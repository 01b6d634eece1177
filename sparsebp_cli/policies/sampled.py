"""Shared options of example selectors: which share of a batch they keep, and of those that are active during a part of
the training, from when to when and how often. Names and defaults of the latter are those of Composer's
``SelectiveBackprop``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field, NonNegativeInt, model_validator
from typing_extensions import override

from sparsebp_cli.policy import Examples, ExampleSelector, Step, choice, sampling

if TYPE_CHECKING:
    from torch import Tensor

Keep = Annotated[
    float,
    Field(
        gt=0.0, le=1.0, description="Share of each batch's examples that is backpropagated, in (0, 1]; 1.0 is dense."
    ),
]


class KeptExamples(ExampleSelector):
    """An example selector that keeps the same number of examples of each batch, at every step."""

    keep: Keep = 0.5

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    @property
    def budget(self) -> float:
        return 1.0 if self.exact else self.keep

    @property
    def control(self) -> dict[str, object] | None:
        return None if self.exact else {"name": "uniform", "start": 0, "end": 1, "interrupt": 0, "keep": self.keep}

    def count_chosen(self, number: int) -> int:
        """Return how many of a batch's examples are selected, at least 1."""
        return choice.count_kept(self.keep, number)

    def draw(self, score_B: Tensor, examples: Examples, step: Step) -> tuple[Tensor, Tensor]:
        """Draw as many examples as are kept, with probabilities in proportion to a score, without replacement. Return
        their numbers in order, (K,), and 1 / the probability of each."""
        return sampling.draw_by_score(score_B.cpu(), self.count_chosen(examples.number), step.generator(examples))


class SampledExamples(KeptExamples):
    """An example selector that keeps examples between two points of the training, except at interruptions."""

    constants: ClassVar[tuple[str, ...]] = ("start", "end")

    start: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.5, description="Share of the training's steps after which examples are selected."
    )
    end: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        0.9, description="Share of the training's steps after which examples are no longer selected."
    )
    interrupt: NonNegativeInt = Field(
        2, description="Period, in steps, of dense steps while examples are selected; 0: none, 1: every step."
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
        """Return whether examples are selected at a step: between start and end, and not at an interruption."""
        if self.exact or (self.interrupt and (step.index + 1) % self.interrupt == 0):
            return False
        if not self.needs_num_steps:
            return True
        assert step.num_steps is not None
        return self.start <= step.index / step.num_steps < self.end
