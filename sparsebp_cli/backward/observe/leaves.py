"""Leaves of an autograd graph, and the accumulation of a gradient at a leaf."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsebp_cli.backward.observe.internals import hooks_after_accumulation, variable_of

if TYPE_CHECKING:
    from torch.autograd.graph import Node

_LEAF = "torch::autograd::AccumulateGrad"


def find_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves below some tensors that require grad, each once; a leaf that requires grad is its own leaf."""
    leaves: dict[Tensor, None] = {}
    found: dict[Node, None] = {}
    for output in outputs:
        if output.grad_fn is not None:
            found[output.grad_fn] = None
        elif output.requires_grad:
            leaves[output] = None
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        if node.name() == _LEAF:
            variable = variable_of(node)
            leaves[variable] = None
        for child, _ in node.next_functions:
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(leaves)


def accumulate(leaf: Tensor, grad: Tensor, *, is_spare: bool) -> None:
    """Add a gradient to a leaf's ``.grad`` like autograd, on its device and in its dtype, and run post-accumulation
    hooks.

    ``is_spare``: no other code uses the tensor ``grad``, so it may become ``.grad`` itself.
    """
    here = grad.to(leaf.device, leaf.dtype)
    if leaf.grad is None:
        if here.is_sparse or ((is_spare or here is not grad) and here.stride() == leaf.stride()):
            leaf.grad = here
        else:  # with the parameter's strides, which determine the order of sums in a norm
            leaf.grad = torch.empty_like(leaf, requires_grad=False).copy_(here)
    elif leaf.grad.is_sparse or here.is_sparse:
        leaf.grad = leaf.grad + here
    else:
        leaf.grad += here
    # Calling autograd's own accumulation instead would run hooks of `register_hook` a second time.
    for hook in hooks_after_accumulation(leaf):
        hook(leaf)
