"""Choice of the layers that are trained at a step, for policies that train some layers at a time, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from sparsebp_cli.policy import Step

if TYPE_CHECKING:
    from torch import Generator

Order = Literal["descending", "ascending", "random", "independent"]


@dataclass(frozen=True)
class _Round:
    """The name from which the random order of layers in one round is drawn."""

    name: str = "the order of layers"


@dataclass(frozen=True)
class _Turn:
    """The name from which the layers of one turn are drawn, independently of other turns."""

    name: str = "the layers of a turn"


def find_in_turn(layers: Sequence[int], order: Order, every: int, at_once: int, step: Step) -> set[int]:
    """Return the layers that are in turn at a step.

    Args:
        layers: Indices of all layers that take turns, ascending.
        order: Order of the turns. ``random`` is a new order in each round; ``independent`` draws each turn separately.
        every: Steps of a turn.
        at_once: Layers of a turn; the last turn of a round may have fewer.
        step: The step, whose index determines the turn.

    Returns:
        The indices of the layers in turn.
    """
    if order == "independent":
        return set(_shuffle(layers, replace(step, index=step.index // every).generator(_Turn()))[:at_once])
    round_number, number = divmod(step.index // every, -(-len(layers) // at_once))
    if order == "random":
        layers = _shuffle(layers, replace(step, index=round_number).generator(_Round()))
    elif order == "descending":
        layers = layers[::-1]
    return set(layers[number * at_once : (number + 1) * at_once])


def _shuffle(layers: Sequence[int], generator: Generator) -> list[int]:
    import torch

    return [layers[place] for place in torch.randperm(len(layers), generator=generator).tolist()]
