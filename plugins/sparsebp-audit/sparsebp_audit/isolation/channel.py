"""Find every path by which a script's loss reaches a model's parameters: the channels between model and loss.

The loss's graph is followed down. A channel is a tensor from the model's forward whose values belong to single
examples: an output, or a hidden state that a hook has kept. Paths that reach a parameter without a channel are reported
as well. A penalty on the parameters themselves is no path through the model.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sparsebp_cli.backward.isolation.examples import Examples


@dataclass
class Channel:
    """A tensor between a model and a loss."""

    call: int  # number of the model's call
    edge: GradientEdge
    owner: Tensor  # number of the example, by row or by position; -1: none


@dataclass
class Forward:
    """One call of a model, and the graph nodes that it made."""

    number: int
    examples: Examples
    begin: int  # sequence numbers of its nodes, the last one excluded
    end: int
    outputs: list[Tensor] = field(default_factory=list)  # outputs with a gradient
    allowed: Tensor | None = None  # an output that reads all examples by definition


def find_channels(losses: Sequence[Tensor], forwards: Sequence[Forward]) -> tuple[list[Channel], bool]:
    """Return the channels that losses read, and whether a loss reaches a parameter without a channel."""
    channels: dict[tuple[Any, int], Channel] = {}
    known: dict[tuple[Any, int], Channel | None] = {}
    for forward in forwards:
        for output in forward.outputs:
            edge = get_gradient_edge(output)
            owner = find_owners(forward.examples, output.shape)
            if owner is not None:
                known[edge.node, edge.output_nr] = Channel(forward.number, edge, owner)
        if forward.allowed is not None:
            edge = get_gradient_edge(forward.allowed)
            known[edge.node, edge.output_nr] = None
    edges = [get_gradient_edge(loss) for loss in losses if loss.requires_grad]
    waiting: list[tuple[Any, int, bool]] = [(edge.node, edge.output_nr, False) for edge in edges]
    seen, is_bypassed = set[tuple[Any, int]](), False
    while waiting:
        node, number, was_inside = waiting.pop()
        key = (node, number)
        if key in seen:
            continue
        seen.add(key)
        if key in known:
            if (channel := known[key]) is not None:
                channels[key] = channel
            continue
        if hasattr(node, "variable"):  # a leaf
            is_bypassed |= was_inside
            continue
        forward_of = next((f for f in forwards if f.begin <= node._sequence_nr() < f.end), None)  # noqa: SLF001
        if forward_of is not None and not was_inside:
            shape = node._input_metadata[number].shape  # noqa: SLF001
            owner = find_owners(forward_of.examples, shape)
            if owner is not None:
                channels[key] = Channel(forward_of.number, GradientEdge(node, number), owner)
                continue
        waiting += [(below, n, forward_of is not None) for below, n in node.next_functions if below is not None]
    return list(channels.values()), is_bypassed


def find_owners(examples: Examples, shape: Sequence[int]) -> Tensor | None:
    """Return the example's number for each row, or each position if the tensor has positions; -1: none. None if the
    tensor's values belong to no single example."""
    rows, width = examples.size
    owner_BT = torch.full((rows, width), -1)
    for number, example in enumerate(examples.found):
        owner_BT[example.row, example.columns] = number
    if tuple(shape[:2]) == (rows, width):
        return owner_BT
    if tuple(shape[:2]) == (rows, width - 1) and width > 2:  # of the tokens that each position predicts
        return owner_BT[:, :-1]
    if shape and shape[0] == rows * width and width > 1:
        return owner_BT.flatten()
    if not shape or shape[0] != rows or examples.several:
        return None
    owner_B = torch.full((rows,), -1)
    for number, example in enumerate(examples.found):
        owner_B[example.row] = number
    return owner_B


def tensors_of(output: object) -> list[Tensor]:
    """Return all tensors of a model's output, including nested tuples."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in tensors_of(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in tensors_of(value)]
    if hasattr(output, "__dataclass_fields__"):
        return [tensor for value in vars(output).values() for tensor in tensors_of(value)]
    return []
