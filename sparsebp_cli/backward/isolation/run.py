"""Runs of a model for the isolation check: without dropout, and without effects on the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from sparsebp_cli.backward.observe.internals import is_batch_norm
from sparsebp_cli.backward.patch.rng import capture_generators, generators_at

_F = torch.nn.functional
_DROPOUTS: tuple[object, ...] = (_F.dropout, _F.dropout1d, _F.dropout2d, _F.dropout3d, torch.dropout)
_DROPOUTS += (_F.alpha_dropout, _F.feature_alpha_dropout, torch.native_dropout)
_ATTENTION = _F.scaled_dot_product_attention


class WithoutDropout(TorchFunctionMode):
    """Lets dropout return its input. The model stays in training mode, since eval mode may run other code."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function without dropout."""
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is _ATTENTION:
            kwargs |= {"dropout_p": 0.0} if len(args) < 5 else {}
            args = (*args[:4], 0.0, *args[5:]) if len(args) >= 5 else args
        return func(*args, **kwargs)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run the block without dropout and with running statistics in batch norms, so that a single example runs and other
    leaks show. Restore modes, buffers and random generators afterwards."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    skips = [m for m in model.modules() if isinstance(getattr(m, "layerdrop", None), float)]
    # MultiheadAttention reaches a function mode as one call, inside which the mode is off, so it misses the dropout.
    skips += [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    rates = [(m, name, getattr(m, name)) for m in skips for name in ("layerdrop", "dropout") if hasattr(m, name)]
    norms = [module for module in model.modules() if is_batch_norm(module) and module.training]
    try:
        for norm in norms:
            norm.training = False
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        with generators_at(capture_generators(device), device), WithoutDropout():
            yield
    finally:
        for norm in norms:
            norm.training = True
        for module, name, rate in rates:
            setattr(module, name, rate)
        with torch.no_grad():
            for buffer, before in buffers.items():
                if buffer.shape == before.shape:
                    buffer.copy_(before)
