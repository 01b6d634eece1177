"""Freeze a weight matrix permanently once its gradient is small.

Qifu Wen, Xi Zeng, Zihan Zhou, Shuaijun Liu, Mehdi Hosseinzadeh, Ningxin Su and Reza Rawassizadeh, "GradES:
Significantly Faster Training in Transformers with Gradient-Based Early Stopping" (2025),
https://arxiv.org/abs/2509.01842, after the abstract and the first version, which sums the magnitudes of a matrix's
gradient. (The third version measures the change of the gradient between two steps.) We differ: we use the gradient
after clipping. When all matrices are frozen, we still train norms, embeddings and head to the last step; the paper
stops. Our threshold may be relative to the matrix's first sum, because a sum depends on the matrix's size. Most of the
paper's saving comes from stopping early, so compare with dense training for fewer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from pydantic import Field

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
    from sparsebp_cli.policy import State


class _Draw:
    """Key of the control's draw of the order of matrices."""

    name = "the order of matrices"


@final
class GradES(Stateful[Parameter], ParameterSelector):
    """Train everything at first; freeze each weight matrix of the layers permanently when its gradient is small."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="For long trainings in which matrices stop changing at different times. Compare with dense training for "
        "fewer steps, which ends early as well.",
        year=2025,
        saves=("time", "memory"),
        work="(2 + trained) / 3",
        memory="No inputs of frozen weights. Their optimizer state is freed.",
        claimed="1.57 to 7.22 times as fast, mostly because training ends early; small language models.",
        code="Not found.",
    )

    takes_schedules = False

    threshold: Annotated[float, Field(ge=0.0)] = Field(
        description=(
            "A weight matrix is frozen when the sum of the absolute entries of its gradient is below this; 0 is dense."
        )
    )
    relative: bool = Field(
        False,
        description=(
            "Whether threshold is a fraction of the sum of absolute entries that the matrix's gradient had at the "
            "first step after grace."
        ),
    )
    grace: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.5, description="Fraction of the training's steps, from the start, during which nothing is frozen, in [0, 1)."
    )
    by: Literal["gradient", "random"] = Field(
        "gradient",
        description=(
            "gradient: freeze matrices with a small gradient. random: freeze as many random matrices, as a control."
        ),
    )

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
        return True  # a frozen matrix never trains again

    @property
    def observes(self) -> frozenset[type[Observed]]:
        return frozenset() if self.exact else frozenset({ParameterGradient})

    def measure(self, seen: Observed, step: Step) -> dict[str, Measure]:  # noqa: ARG002
        assert isinstance(seen, ParameterGradient)
        return {"size": Measure(choice.l1_norm(seen.gradient))}

    @property
    def control(self) -> dict[str, object] | None:
        if self.exact or self.by == "random":
            return None
        return {"name": "grades", **self.model_dump(mode="json"), "by": "random"}

    def init(self, places: Sequence[Parameter], /) -> State:
        import torch

        names = _matrices(places)
        if not names and not self.exact:
            raise PolicyError(
                "grades freezes weight matrices of transformer layers, but the model trains no such matrix"
            )
        start = {f"start/{name}": torch.zeros(()) for name in names}
        small, rank = torch.zeros(len(names), dtype=torch.bool), torch.zeros(len(names))
        return {**start, "small": small, "rank": rank, "begun": 0.0}

    def observe(self, state: State, observation: Observation, step: Step) -> State:
        import torch

        names = sorted(key.removeprefix("start/") for key in state if key.startswith("start/"))
        if self.exact or step.index < self._first(step):
            return dict(state)
        size = observation["size"]
        new, small, rank = dict(state), state["small"], state["rank"]
        assert isinstance(small, torch.Tensor)
        assert isinstance(rank, torch.Tensor)
        if not state["begun"]:
            new["begun"] = 1.0
            new |= {f"start/{n}": size[n].float() for n in names if n in size}
            order = torch.randperm(len(names), generator=step.generator(_Draw()))
            rank = order.to(rank)
        limits = [self.threshold * (new[f"start/{n}"] if self.relative else 1.0) for n in names]
        seen = [size.get(name, torch.inf) for name in names]
        device = small.device
        below = [torch.as_tensor(value < limit, device=device) for value, limit in zip(seen, limits, strict=True)]
        return new | {"small": small | torch.stack(below), "rank": rank}

    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        import torch

        names = [parameter.name for parameter in parameters]
        if self.exact or step.index <= self._first(step):
            return names
        small, rank = step.state["small"], step.state["rank"]
        assert isinstance(small, torch.Tensor)
        assert isinstance(rank, torch.Tensor)
        frozen = small if self.by == "gradient" else rank < small.sum()
        matrices = zip(_matrices(parameters), frozen.tolist(), strict=True)
        left = set(names) - {name for name, is_frozen in matrices if is_frozen}
        return [name for name in names if name in left] or names[-1:]  # the contract requires at least one

    def _first(self, step: Step) -> int:
        """Return the first step after the grace period."""
        if self.grace == 0.0:
            return 0
        if step.num_steps is None:
            raise PolicyError(
                "grace is a fraction of the training's steps: pass the number of steps to attach(..., num_steps=...)"
            )
        return int(self.grace * step.num_steps)


def _matrices(parameters: Sequence[Parameter]) -> list[str]:
    """Return the names of the weight matrices of layers, in the order of the state's tensors."""
    return sorted(p.name for p in parameters if p.layer is not None and len(p.shape) == 2)
