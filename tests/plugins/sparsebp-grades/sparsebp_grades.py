"""GradES as a package writes it (arXiv 2509.01842): a matrix whose gradient is small is frozen for good.

What it needs to look at, the sum of a gradient's magnitudes, is a line of its own: no other file knows of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, final

import torch
from pydantic import Field

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import (
    Measure,
    Observation,
    Observed,
    Parameter,
    ParameterGradient,
    ParameterSelector,
    Stateful,
    Step,
)

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy import State


class _Order:
    name = "the order of matrices"  # of the control


@final
class GradES(Stateful[Parameter], ParameterSelector):
    """Freeze each weight matrix of the layers for good once the sum of its gradient's magnitudes is small."""

    takes_schedules = False

    threshold: Annotated[float, Field(ge=0.0)] = Field(
        description="The sum below which a matrix is frozen; 0 is dense."
    )
    relative: bool = Field(False, description="Whether it is a share of the first sum after the grace.")
    grace: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.5, description="Share of the steps that freeze nothing.")
    by: Literal["gradient", "random"] = Field("gradient", description="Which are frozen; random: as many, the control.")

    @property
    def exact(self) -> bool:
        return self.threshold == 0.0

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def changes(self) -> bool:
        return not self.exact

    @property
    def drops_state(self) -> bool:
        return True

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset() if self.exact else frozenset({ParameterGradient})

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:
        assert isinstance(seen, ParameterGradient)
        return {"magnitude": Measure(seen.gradient.abs().sum(dtype=torch.float32))}

    def init(self, places: Sequence[Parameter], /) -> State:
        number = len(_matrices(places))
        if not number and not self.exact:
            raise PolicyError("no parameter that the model would train is a matrix of a layer")
        return {
            "first": torch.zeros(number),
            "frozen": torch.zeros(number, dtype=torch.bool),
            "rank": torch.zeros(number),
            "begun": 0.0,
            **{f"name/{name}": 0.0 for name in _matrices(places)},
        }

    def observe(self, state: State, observation: Observation, step: Step) -> State:
        if self.exact or step.index < self._first(step):
            return dict(state)
        names = sorted(key.removeprefix("name/") for key in state if key.startswith("name/"))
        first, frozen, rank = (_tensor(state, key) for key in ("first", "frozen", "rank"))
        sums = [observation["magnitude"].get(name) for name in names]
        if not state["begun"]:
            first = torch.stack([first[n] if size is None else size.to(first) for n, size in enumerate(sums)])
            rank = torch.randperm(len(names), generator=step.generator(_Order())).to(rank)
        limit = self.threshold * (first if self.relative else torch.ones_like(first))
        size = torch.stack([torch.full_like(first[0], torch.inf) if s is None else s.to(first) for s in sums])
        return {**state, "first": first, "frozen": frozen | (size < limit), "rank": rank, "begun": 1.0}

    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        names = [parameter.name for parameter in parameters]
        if self.exact or step.index <= self._first(step):
            return names
        frozen = _tensor(step.state, "frozen")
        if self.by == "random":
            frozen = _tensor(step.state, "rank") < frozen.sum()
        out = {name for name, is_out in zip(_matrices(parameters), frozen.tolist(), strict=True) if is_out}
        return [name for name in names if name not in out] or names[-1:]

    def _first(self, step: Step) -> int:
        assert step.num_steps is not None or self.grace == 0.0, "grace is a share of the training"
        return int(self.grace * (step.num_steps or 0))


def _matrices(parameters: Sequence[Parameter]) -> list[str]:
    return sorted(p.name for p in parameters if p.layer is not None and len(p.shape) == 2)


def _tensor(state: State, key: str) -> Tensor:
    value = state[key]
    assert isinstance(value, torch.Tensor)
    return value
