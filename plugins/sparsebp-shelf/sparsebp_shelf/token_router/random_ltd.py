"""Send random positions through each middle layer; their number grows until all go through.

Zhewei Yao, Xiaoxia Wu, Conglong Li, Connor Holmes, Minjia Zhang, Cheng Li and Yuxiong He, "Random-LTD: Random and
Layerwise Token Dropping Brings Efficient Training for Large-scale Transformers" (2022),
https://arxiv.org/abs/2211.11586. As published, the first and the last layer get all positions, and every other layer
draws its own positions for each example. Their number at step s of S is floor(s / S * (max - min) + min), rounded down
to a multiple of ``increase_step``. We differ: ``over`` gives S as a fraction of the training. From there on exactly
``max`` positions go through, even if it is no multiple. The recipe sets the learning rate; the paper schedules it by
tokens.

Cost: a layer multiplies K / T of the rows and (K / T)^2 of the pairs of attention, forward and backward, and saves less
in proportion. Padding is drawn like any position. Use it for long trainings on long sequences, such as pre-training, or
as a control that saves the same FLOPs. Do not use it on a short fine-tune: it trains a model in which positions bypass
layers, but evaluation uses all layers.
"""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, final

from pydantic import Field, model_validator
from typing_extensions import override

from sparsebp_cli.policy import MethodCard, Step
from sparsebp_shelf.token_router.kind import RoutedLayer, TokenRouter

if TYPE_CHECKING:
    import torch


@final
class RandomLTD(TokenRouter):
    """Send a growing number of random positions through each layer but the first and the last."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="For long training and long sequences, as in pretraining. Not for a short fine-tune.",
        year=2022,
        saves=("time", "memory"),
        work="computed",
        memory="The rows that go through each layer.",
        claimed="33 % fewer FLOPs and 26 % less time, GPT-3 of 1.3 billion parameters, pretraining.",
        code="DeepSpeed, Apache-2.0.",
    )

    takes_schedules: ClassVar[bool] = False

    min_tokens: Annotated[int, Field(ge=1)] = Field(
        128, description="Number of positions of each example that go through a layer at the first step."
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description=(
            "Number of positions of each example that go through a layer in the end, at least min_tokens. null: all "
            "positions."
        ),
    )
    increase_step: Annotated[int, Field(ge=1)] = Field(
        16, description="The number of positions is rounded down to a multiple of this, but not below min_tokens."
    )
    over: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="Fraction of the training, in (0, 1], after which max_tokens positions go through each layer."
    )

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens must be at least min_tokens {self.min_tokens}, got {self.max_tokens}")
        return self

    @property
    def exact(self) -> bool:
        return False  # whether positions bypass depends on the length of the batch

    @property
    @override
    def needs_num_steps(self) -> bool:
        return True

    def count(self, layer: RoutedLayer, step: Step) -> int:
        if layer.number in (0, layer.num_layers - 1):
            return layer.length
        most = layer.length if self.max_tokens is None else self.max_tokens
        return min(layer.length, max(1, self._grow(most, step)))

    def route(self, layer: RoutedLayer, step: Step) -> torch.Tensor:
        import torch

        drawn_BT = torch.rand(layer.num_examples, layer.length, generator=step.generator(layer))
        return drawn_BT.topk(self.count(layer, step)).indices.sort(1).values

    def _grow(self, most: int, step: Step) -> int:
        assert step.num_steps is not None, "refused at attach"
        done = step.index / (self.over * step.num_steps)
        if done >= 1.0 or most <= self.min_tokens:
            return most
        number = floor(round(done * (most - self.min_tokens) + self.min_tokens, 6))
        return max(self.min_tokens, number - number % self.increase_step)
