"""Let the learning rate of each layer fall to 0 by a cosine, lower layers first, and then freeze the layer.

Andrew Brock, Theodore Lim, J. M. Ritchie and Nick Weston, "FreezeOut: Accelerate Training by Progressively Freezing
Layers" (2017), https://arxiv.org/abs/1706.04983, after the abstract. We differ: the rate is a factor of the optimizer's
own rate, which should be constant. The layers are a transformer's. Parameters below them, such as embeddings, count as
the lowest layer; parameters above them, such as the head, are the last and are trained to the end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import MethodCard, Parameter, ParameterSelector, Step
from sparsebp_shelf.policies.depth import group_by_depth


class _Draw:
    """Key of the control's draw of the order of layers."""

    name = "the order of layers"


@final
class FreezeOut(ParameterSelector):
    """Lower each layer's own learning rate to 0 and then freeze it, the lowest layer first."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="For a training from scratch or a long one, at a constant learning rate. The backward ends above what is "
        "frozen.",
        year=2017,
        saves=("time", "memory"),
        work="(1 + 2 * trained) / 3",
        memory="No input of a frozen weight; its optimizer state is freed.",
        claimed="Up to 20 % less time for convolutional networks.",
        code="Not read.",
    )

    takes_schedules = False

    start: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.8,
        description=(
            "Fraction of the training, in (0, 1), after which the lowest group is frozen: the parameters below all "
            "layers, such as embeddings."
        ),
    )
    curve: Literal["linear", "cubic"] = Field(
        "linear",
        description=(
            "When each layer is frozen. linear: at fractions of the training that are evenly spaced from start to "
            "1. cubic: at the cubes of these fractions, also for start."
        ),
    )
    scaled: bool = Field(
        False,
        description=(
            "Whether each layer's learning rate is divided by the fraction of the training after which the layer is "
            "frozen. All layers then move about equally far."
        ),
    )
    order: Literal["depth", "random"] = Field(
        "depth",
        description="depth: freeze lower layers earlier. random: freeze layers in a random order, as a control.",
    )

    @property
    def exact(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def changes(self) -> bool:
        return True

    @property
    def drops_state(self) -> bool:
        return True  # a frozen layer never trains again

    @property
    def sets_rates(self) -> bool:
        return True

    @property
    def control(self) -> dict[str, object] | None:
        return (
            None if self.order == "random" else {"name": "freezeout", **self.model_dump(mode="json"), "order": "random"}
        )

    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        now = _share(step)
        ends = self.ends(parameters, step)
        last = max(ends.values())
        return [p.name for p in parameters if now < ends[p.name] or ends[p.name] == last]

    def rates(self, parameters: Sequence[Parameter], step: Step) -> Mapping[str, float]:
        now = _share(step)
        return {name: self.rate(now, end) for name, end in self.ends(parameters, step).items()}

    def rate(self, now: float, end: float) -> float:
        """Return the learning rate's factor at ``now`` for a layer that ends at ``end``, fractions of the training."""
        factor = 0.5 * (1.0 + math.cos(math.pi * min(now / end, 1.0)))
        return factor / end if self.scaled else factor

    def ends(self, parameters: Sequence[Parameter], step: Step) -> dict[str, float]:
        """Return the fraction of the training at which each parameter is frozen, by its name."""
        below, layers, above = group_by_depth(parameters)
        groups = [group for group in (below, *layers, above) if group]
        gap = (1.0 - self.start) / max(1, len(groups) - 1)
        ends = [self.start + gap * number for number in range(len(groups) - 1)] + [1.0]
        if self.curve == "cubic":
            ends = [end**3 for end in ends]
        if self.order == "random":
            import torch

            generator = replace(step, index=0).generator(_Draw())
            ends = [ends[i] for i in torch.randperm(len(ends), generator=generator).tolist()]
        # Rounded, so that floating-point error cannot move an end past a step that it equals.
        ends = [round(end, 12) for end in ends]
        return {name: end for group, end in zip(groups, ends, strict=True) for name in group}


def _share(step: Step) -> float:
    if step.num_steps is None:
        raise PolicyError(
            "freezeout freezes layers at fractions of the training's steps: pass their number to attach(..., "
            "num_steps=...)"
        )
    return step.index / step.num_steps
