"""Freeze the lowest layers once their gradients have stopped changing.

Yuhan Liu, Saurabh Agarwal and Shivaram Venkataraman, "AutoFreeze: Automatically Freezing Model Blocks to Accelerate
Fine-tuning" (2021), https://arxiv.org/abs/2102.01386, after the abstract. We differ: the norm of an interval is the sum
of its steps' norms, not the norm of their sum, and so needs no second copy of the gradients. Each step computes the
activations of frozen layers again; the paper stores them on disk.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field, PositiveInt

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import (
    Measure,
    MethodCard,
    Observation,
    Observed,
    Parameter,
    ParameterGradient,
    ParameterSelector,
    Stateful,
    Step,
    choice,
)

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy import State


class _Draw:
    """Key of the control's draw of the order of layers."""

    name = "the order of layers"


@final
class AutoFreeze(Stateful[Parameter], ParameterSelector):
    """Freeze the lowest layers permanently, more of them over the training, when their gradient norm hardly changes."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="For fine-tuning if lower layers settle early. The backward ends above the frozen layers.",
        year=2021,
        saves=("time", "memory"),
        work="(1 + 2 * trained) / 3",
        memory="No input of a frozen weight; its optimizer state is freed.",
        claimed="Up to 2.55 times as fast with BERT, part of it by stored activations, which are not supported here.",
        code="Not read.",
    )

    takes_schedules = False

    every: PositiveInt = Field(
        100, description="Number of optimizer steps in an interval. Layers may be frozen at the end of each interval."
    )
    percentile: Annotated[float, Field(ge=0.0, le=100.0)] = Field(
        50.0,
        description=(
            "A layer may be frozen if its gradient norm changed less than this percentile of all trained layers, 0 "
            "to 100; 0 is dense."
        ),
    )
    by: Literal["change", "random"] = Field(
        "change",
        description=(
            "change: freeze the lowest layers, if their gradient norms changed little. random: freeze as many "
            "layers, but random ones, as a control."
        ),
    )

    @property
    def exact(self) -> bool:
        return self.percentile == 0.0

    @property
    def unbiased(self) -> bool:
        return self.exact

    @property
    def changes(self) -> bool:
        return not self.exact

    @property
    def drops_state(self) -> bool:
        return True  # a frozen layer never trains again

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset() if self.exact else frozenset({ParameterGradient})

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:  # noqa: ARG002
        assert isinstance(seen, ParameterGradient)
        return {"norm": Measure(choice.l2_norm(seen.gradient))}

    @property
    def control(self) -> dict[str, object] | None:
        if self.exact or self.by == "random":
            return None
        return {"name": "autofreeze", **self.model_dump(mode="json"), "by": "random"}

    def init(self, places: Sequence[Parameter], /) -> State:
        import torch

        _, layers = _group_by_depth(places)
        zeros = torch.zeros(len(layers))
        numbers = {f"layer/{name}": float(number) for number, names in enumerate(layers) for name in names}
        return {**numbers, "sum": zeros, "before": zeros, "frozen": torch.zeros(()), "rank": zeros, "intervals": 0.0}

    def observe(self, state: State, observation: Observation, step: Step) -> State:
        import torch

        if self.exact:
            return dict(state)
        total, before = _tensor(state, "sum"), _tensor(state, "before")
        squares = torch.zeros_like(total)
        for name, norm in observation["norm"].items():
            if f"layer/{name}" in state:
                squares[int(state[f"layer/{name}"])] += norm.to(squares) ** 2
        total = total + squares.sqrt()
        if (step.index + 1) % self.every:
            return {**state, "sum": total}
        new = {**state, "sum": torch.zeros_like(total), "before": total, "intervals": state["intervals"] + 1.0}
        if state["intervals"] == 0.0:
            new["rank"] = torch.randperm(len(total), generator=step.generator(_Draw())).to(total)
            return new
        return new | {"frozen": self.count_frozen(before, total, _tensor(state, "frozen"))}

    def count_frozen(self, before_L: Tensor, after_L: Tensor, frozen: Tensor) -> Tensor:
        """Return how many of the lowest layers are frozen, 0-d, from the norms of two intervals and the count so far.
        It adds trained layers from the lowest while their relative change is below the percentile."""
        import torch

        changes_L = (before_L - after_L).abs() / before_L
        # no gradient in either interval: not known to be settled
        changes_L = torch.where(changes_L.isnan(), torch.inf, changes_L)
        trained_L = torch.arange(len(changes_L), device=changes_L.device) >= frozen
        ordered = torch.where(trained_L, changes_L, torch.inf).sort().values
        # The percentile among the trained layers, interpolated as numpy does.
        place = (len(changes_L) - frozen - 1) * self.percentile / 100.0
        low, high = ordered[place.floor().long()], ordered[place.ceil().long()]
        limit = torch.where(low.isinf() | high.isinf(), low, low + (high - low) * (place - place.floor()))
        settled_L = ~trained_L | (changes_L < limit)
        return settled_L.to(changes_L).cumprod(0).sum().clamp(max=len(changes_L) - 1)

    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        names = [parameter.name for parameter in parameters]
        if self.exact:
            return names
        below, layers = _group_by_depth(parameters)
        count = int(_tensor(step.state, "frozen"))
        ranks = _tensor(step.state, "rank").tolist() if self.by == "random" else range(len(layers))
        resting = {name for rank, group in zip(ranks, layers, strict=True) if rank < count for name in group}
        resting |= set(below if count and self.by == "change" else ())
        return [name for name in names if name not in resting]


def _group_by_depth(parameters: Sequence[Parameter]) -> tuple[list[str], list[list[str]]]:
    """Return the names of parameters below the layers, and in each layer from the first.

    Parameters before the first layer in the model's order, such as embeddings, are below. A shared parameter counts at
    its first name, so a head that is tied to embeddings is below: while it is trained, the backward must reach the
    embeddings. Raises :class:`PolicyError` if there is no layer.
    """
    numbers = sorted({p.layer for p in parameters if p.layer is not None})
    if not numbers:
        raise PolicyError(
            "the policy freezes transformer layers by depth, but the model trains no parameter of a layer"
        )
    first = next(place for place, p in enumerate(parameters) if p.layer is not None)
    below = [p.name for p in parameters[:first]]
    layers = [[p.name for p in parameters if p.layer == number] for number in numbers]
    return below, layers


def _tensor(state: State, name: str) -> Tensor:
    import torch

    value = state[name]
    assert isinstance(value, torch.Tensor)
    return value
