"""The products of the dense backward of a forward that was not run densely: from a forward on tensors without values.

Policies that leave out positions, examples, blocks or parameters before the backward leave no trace of them in the
graph. PyTorch's fake tensors have shapes and no values, so a forward on them costs neither multiplications nor memory,
draws no random numbers, and has the graph that the dense forward would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from sparsebp_cli.backward.observe.loss_graph import Products
from sparsebp_cli.backward.patch.forward import NotCopyable

_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class _Shape:
    """A tensor, without its values."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class CallShape:
    """The arguments of a forward, tensors by their shapes; equal if a dense forward would have the same products."""

    leaves: tuple[object, ...]
    spec: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallShape | None:
        """Return those of a call; None if it has arguments that are neither tensors nor plain values."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            return None
        shapes = (
            _Shape(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        )
        return cls(tuple(shapes), spec)

    def fill(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with tensors of these shapes, of whatever values."""
        made = [
            torch.empty(leaf.size, dtype=leaf.dtype, device=leaf.device).requires_grad_(leaf.requires_grad)
            if isinstance(leaf, _Shape)
            else leaf
            for leaf in self.leaves
        ]
        filled: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(made, self.spec)
        return filled


class CallNote(NotCopyable):
    """A hook before the model's forward that reports the arguments where gradients are enabled, except under
    ``torch.compile``.
    """

    def __init__(self, note: Callable[[tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        self._note = note

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Report them."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._note(args, kwargs)


def count_dense(model: nn.Module, call: CallShape) -> Products | None:
    """Return the products of the backward of a call, by the names of parameters; None if the model asks for values.

    Parameters that require a gradient now are trained. No module changes, and nothing is computed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # which takes long to import

    products = Products()
    try:
        # A model may keep tensors that are neither parameters nor buffers.
        with torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake: dict[str, Tensor] = {name: mode.from_tensor(buffer) for name, buffer in model.named_buffers()}
            for name, parameter in model.named_parameters():
                # A parameter again: products are attributed to parameters by their class.
                fake[name] = nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
            args, kwargs = call.fill()
            loss = _sum(functional_call(model, fake, args, kwargs, tie_weights=True))
            products.add(loss, {id(tensor): name for name, tensor in fake.items()})
    except Exception:  # whatever a model makes of tensors without values
        return None
    return products


def _sum(output: Any) -> Tensor:
    """Return a scalar that depends on all that a loss may read: the model's loss, or the first output."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = next(iter(_tensors(output)))
    return first.sum()


def _tensors(output: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad)
