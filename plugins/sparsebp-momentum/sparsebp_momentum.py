"""Keep the output features whose gradients were largest so far, by a momentum of their norms."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from sparsebp_cli.policy import (
    Columns,
    InformedSelector,
    Measure,
    Observation,
    Seen,
    Site,
    SiteGradient,
    Stateful,
    Step,
    choice,
)


class Momentum(Stateful, InformedSelector):
    """Keep features by ``decay`` times the momentum plus the last step's norm; the first step keeps the first ones."""

    keep: Annotated[float, Field(gt=0.0, le=1.0)] = Field(description="Share of the features, in (0, 1]; 1.0 is dense.")
    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="Share of the momentum that stays a step.")

    exact = property(lambda self: self.keep == 1.0)
    unbiased = property(lambda self: self.exact)
    budget = property(lambda self: self.keep)
    selection = property(lambda self: None if self.exact else Columns)
    observes = property(lambda _: frozenset({SiteGradient}))

    def init(self, sites: Sequence[Site]):
        import torch

        return {site.name: torch.zeros(site.num_features) for site in sites}

    def measure(self, seen: SiteGradient, step: Step):  # noqa: ARG002
        return {"norm": Measure(choice.norm(seen.shown.grad_NO, 0), fold="hypot")}

    def observe(self, state, observation: Observation, step: Step):  # noqa: ARG002
        new = {name: self.decay * state[name] + norm_O for name, norm_O in observation["norm"].items()}
        return {**state, **{name: momentum_O.to(state[name].dtype) for name, momentum_O in new.items()}}

    def choose(self, seen: Seen, site: Site, step: Step) -> Columns | None:  # noqa: ARG002
        return None if self.exact else choice.choose_columns(step.state[site.name], self.keep)
