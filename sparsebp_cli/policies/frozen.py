"""Train some parameters and freeze the others, for the whole run or in turns.

Training one layer at a time, in turn: Qijun Luo, Hengxu Yu and Xiao Li, "BAdam: A Memory Efficient Full Parameter
Optimization Method for Large Language Models" (NeurIPS 2024), https://arxiv.org/abs/2404.02827. New random layers for
each turn, with embeddings and head always trained: Rui Pan et al., "LISA: Layerwise Importance Sampling for
Memory-Efficient Large Language Model Fine-Tuning" (NeurIPS 2024), https://arxiv.org/abs/2403.17919.

We differ. By default the optimizer keeps a layer's state after its turn, as LISA's code does; BAdam's code drops it. We
train parameters outside the layers at every step, unless a pattern freezes them. We make no 32-bit copy of the layers
in turn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, Literal, Self, final

from pydantic import Field, PositiveInt, model_validator

from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policies.layer_turn import Order, find_in_turn
from sparsebp_cli.policies.parameter_pattern import Pattern, match
from sparsebp_cli.policy import MethodCard, Parameter, ParameterSelector, Step


@final
class Frozen(ParameterSelector):
    """Train the parameters that patterns name, or all others; train the layers all the time, or in turns."""

    card: ClassVar[MethodCard | None] = MethodCard(
        use="If the lower layers need no training, or the optimizer state does not fit into memory. If you train "
        "embeddings, the backward still runs down to them.",
        year=2024,
        saves=("time", "memory"),
        work="(2 + trained) / 3",
        memory="No inputs and no optimizer state of frozen weights.",
        claimed="BAdam: Llama 3 8B trains in 23.5 GB. LISA: better than LoRA with equal memory, LLaMA-2 7B to 70B.",
        measured="The saved bytes equal the estimate (results, measurements).",
        code="BAdam (Ledzy/BAdam) and LMFlow, Apache-2.0; LMFlow keeps a layer's optimizer state after its turn.",
    )
    # Options of a cache for outputs of frozen layers, and of held learning rates, which 0.5 had.
    former_options: ClassVar[tuple[tuple[str, object], ...]] = (
        ("learning_rate", "step"),
        ("cache", None),
        ("cache_dtype", "exact"),
        ("cache_padding", "keep"),
        ("cache_bytes", 2**30),
    )

    train: list[Pattern] | None = Field(
        None, description="Parameters or modules to train: globs or /regex/. null: all that freeze does not match."
    )
    freeze: list[Pattern] | None = Field(
        None, description="Parameters or modules to freeze: globs or /regex/. null: all that train does not match."
    )
    turn: Literal["layers"] | None = Field(
        None,
        description="layers: train the layers in turns, a few at a time (at_once). Trained parameters outside the "
        "layers, such as embeddings, are trained at every step. null: train all layers at every step.",
    )
    order: Order = Field(
        "descending",
        description="Order of the turns. descending: from the last layer to the first. ascending: from the first to "
        "the last. random: a new random order each round. independent: draw the layers of each turn separately.",
    )
    every: PositiveInt = Field(1, description="Number of optimizer steps in a turn.")
    at_once: PositiveInt = Field(1, description="Number of layers that are trained in one turn.")
    optimizer_state: Literal["keep", "drop"] = Field(
        "keep",
        description="What happens to the optimizer state of a layer when its turn ends. keep: nothing. drop: it is "
        "deleted; the next turn starts without it.",
    )

    @model_validator(mode="after")
    def _means_something(self) -> Self:
        if self.train is not None and self.freeze is not None:
            raise ValueError("give only one of train and freeze: train freezes all parameters that it does not name")
        if not self.train and not self.freeze and self.turn is None:
            raise ValueError("give one of the options train, freeze and turn: otherwise nothing is frozen")
        for option in ("order", "every", "at_once", "optimizer_state"):
            if self.turn is None and getattr(self, option) != type(self).model_fields[option].default:
                raise ValueError(f"{option} needs 'turn: layers'")
        return self

    @property
    def exact(self) -> bool:
        return False

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def changes(self) -> bool:
        return self.turn is not None

    @property
    def drops_state(self) -> bool:
        return self.optimizer_state == "drop"

    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        chosen = self._chosen(parameters)
        if self.turn is None:
            return chosen
        layers = _layers(parameters, chosen)
        if not layers:
            raise PolicyError("'turn: layers' needs a transformer layer with trainable parameters")
        resting = set(layers) - find_in_turn(layers, self.order, self.every, self.at_once, step)
        return [p.name for p in parameters if p.name in chosen and p.layer not in resting]

    def _chosen(self, parameters: Sequence[Parameter]) -> set[str]:
        """Return the names of the parameters that are trained at any step."""
        chosen = {parameter.name for parameter in parameters}
        if self.train is not None:
            chosen = match("train", self.train, parameters)
        elif self.freeze is not None:
            chosen -= match("freeze", self.freeze, parameters)
        if not chosen:
            raise PolicyError("freeze: the patterns match all parameters: leave some to train")
        return chosen


def _layers(parameters: Sequence[Parameter], chosen: Collection[str]) -> list[int]:
    return sorted({p.layer for p in parameters if p.name in chosen and p.layer is not None})
