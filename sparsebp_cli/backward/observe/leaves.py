"""Leaves of an autograd graph, and the accumulation of a gradient at a leaf."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sparsebp_cli.backward.observe.graph import LEAF, walk
from sparsebp_cli.backward.observe.internals import hooks_after_accumulation, variable_of


def find_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves below some tensors that require grad, each once; a leaf that requires grad is its own leaf."""
    given = list(outputs)
    own = [output for output in given if output.grad_fn is None and output.requires_grad]
    below = [variable_of(node) for node in walk(*(output.grad_fn for output in given)) if node.name() == LEAF]
    return list(dict.fromkeys([*own, *below]))


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
