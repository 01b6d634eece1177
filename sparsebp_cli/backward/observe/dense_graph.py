"""The products of a dense backward that did not run, from a forward on tensors without values.

If a policy skips positions, examples, blocks or parameters before the backward, the graph does not contain them.
PyTorch's fake tensors have shapes but no values. So a forward on them needs neither multiplications nor memory, draws
no random numbers, and has the graph of the dense forward.
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
    """The properties of a tensor, without its values."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class CallShape:
    """The arguments of a forward, with shapes for tensors. Equal objects have the same products in a dense forward."""

    leaves: tuple[object, ...]
    spec: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallShape | None:
        """Return the arguments of a call; None if one is neither a tensor nor a plain value."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
            return None
        shapes = (
            _Shape(tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        )
        return cls(tuple(shapes), spec)

    def fill(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with tensors of these shapes and arbitrary values."""
        made = [
            torch.empty(leaf.size, dtype=leaf.dtype, device=leaf.device).requires_grad_(leaf.requires_grad)
            if isinstance(leaf, _Shape)
            else leaf
            for leaf in self.leaves
        ]
        filled: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(made, self.spec)
        return filled


class CallNote(NotCopyable):
    """A hook before the model's forward that reports its arguments if gradients are enabled, except under
    ``torch.compile``.
    """

    def __init__(self, note: Callable[[tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        self._note = note

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Report the arguments."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._note(args, kwargs)


def count_dense(model: nn.Module, call: CallShape) -> Products | None:
    """Return the products in the backward of a call, by the names of parameters; None if the model reads values.

    Parameters that require a gradient now count as trained. No module changes, and no value is computed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # which takes long to import

    products = Products()
    try:
        # A model may store tensors that are neither parameters nor buffers.
        with torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake: dict[str, Tensor] = {name: mode.from_tensor(buffer) for name, buffer in model.named_buffers()}
            for name, parameter in model.named_parameters():
                # Make it a parameter, since products are attributed to parameters by their class.
                fake[name] = nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad)
            args, kwargs = call.fill()
            loss = _sum(functional_call(model, fake, args, kwargs, tie_weights=True))
            products.add(loss, {id(tensor): name for name, tensor in fake.items()})
    except Exception:  # a model may raise anything for tensors without values
        return None
    return products


def _sum(output: Any) -> Tensor:
    """Return a scalar that depends on everything that a loss may read: the model's loss, or the first output."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = next(iter(_tensors(output)))
    return first.sum()


def _tensors(output: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad)
