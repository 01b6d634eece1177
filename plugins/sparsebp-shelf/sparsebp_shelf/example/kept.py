"""Share the options, claims, control and draw of example selectors that keep a fraction of each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from sparsebp_cli.policy import Step, choice
from sparsebp_shelf import sampling
from sparsebp_shelf.example.examples import Examples
from sparsebp_shelf.example.kind import ExampleSelector

if TYPE_CHECKING:
    from torch import Tensor

Keep = Annotated[
    float,
    Field(
        gt=0.0, le=1.0, description="Fraction of each batch's examples whose backward runs, in (0, 1]; 1.0 is dense."
    ),
]


class KeptExamples(ExampleSelector):
    """Keep the same number of examples of each batch, at every step."""

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
        """Draw the kept examples without replacement, with probabilities in proportion to a score.

        Return their numbers in order, (K,), and 1 / probability of each.
        """
        return sampling.draw_by_score(score_B.cpu(), self.count_chosen(examples.number), step.generator(examples))
