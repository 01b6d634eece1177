"""Importance sampling of examples as a package writes it (Katharopoulos and Fleuret, arXiv 1803.00942).

The gain that decides whether it pays is a measure of its own: no other file knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, final

import torch
from pydantic import Field, PositiveInt

from sparsebp_cli.policy import Measure, Observation, Observed, Stateful, Step, choice
from sparsebp_shelf import sampling
from sparsebp_shelf.example import Examples, ExampleSelector, ReadExamples, WeightedExamples

if TYPE_CHECKING:
    from sparsebp_cli.policy import State


@final
class Importance(Stateful[object], ExampleSelector):
    """Draw examples in proportion to the norm of the gradient at their logits, or uniformly while that gains little."""

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1 / 3, description="Share of each batch, in (0, 1]; 1: dense."
    )
    threshold: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="Gain that pays; null: 1 + 1 / (3 keep)."
    )
    smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="Of the running mean of the gain.")
    every: PositiveInt = Field(10, description="Steps between two measurements while examples are uniform.")

    @property
    def exact(self) -> bool:
        return self.keep == 1.0

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def budget(self) -> float:
        return self.keep

    @property
    def weighs(self) -> bool:
        return not self.exact

    @property
    def reads_gradient_norm(self) -> bool:
        return True

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset() if self.exact else frozenset({ReadExamples})

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:
        assert isinstance(seen, ReadExamples)
        norm_B = seen.examples.gradient_norm_B
        if norm_B is None:
            return {}
        share_B = norm_B.double() / norm_B.double().sum().clamp(min=1e-300)
        return {"gain": Measure((len(norm_B) * share_B.square().sum()).sqrt())}

    def init(self, places: Sequence[object], /) -> State:
        return {"mean": torch.zeros((), dtype=torch.float64)}

    def observe(self, state: State, observation: Observation, step: Step) -> State:
        mean, found = torch.as_tensor(state["mean"]), list(observation["gain"].values())
        if not found:
            return state
        return {"mean": self.smoothing * mean + (1.0 - self.smoothing) * torch.stack(found).mean().to(mean)}

    def pays(self, step: Step) -> bool:
        needed = 1.0 + 1.0 / (3.0 * self.keep) if self.threshold is None else self.threshold
        return needed == 0.0 or float(step.state["mean"]) > needed

    def needs_loss(self, step: Step) -> bool:
        return not self.exact and (step.index % self.every == 0 or self.pays(step))

    def choose(self, examples: Examples, step: Step) -> WeightedExamples | None:
        if self.exact:
            return None
        norm_B = torch.ones(examples.number)
        if self.pays(step):
            assert examples.gradient_norm_B is not None
            norm_B = examples.gradient_norm_B.cpu()
        kept = choice.count_kept(self.keep, examples.number)
        return WeightedExamples(*sampling.draw_by_score(norm_B, kept, step.generator(examples)))
