"""The gradient that token selection is defined to have, by PyTorch's own backward and hooks; no layout is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.layers import LayerNumbers
from sparsebp_cli.policy.token import TokenMode

from .case import Batch, Outcome, plain_step


def cut(x: Tensor, carries: Tensor) -> Tensor:
    """Return the same values, constants where positions carry no gradient; ``carries`` broadcasts to ``x``."""
    return torch.where(carries, x, x.detach())


# Attentions that call none of the functions below: the linear of queries, keys and values, the place of these three
# among the dimensions of its output once it is split, and what it is split into.
FUSED: dict[str, tuple[str, int, Any]] = {
    "BloomAttention": ("query_key_value", 3, lambda core: (core.num_heads, 3, core.head_dim)),
    "MptAttention": ("Wqkv", 2, lambda core: (3, core.hidden_size)),
}


def cut_fused(core: Any, carries_BT: Tensor) -> Any:
    """Detach keys and values where the fused linear of an attention gives them; return the hook's handle."""
    name, place, split = FUSED[type(core).__name__]
    sizes = split(core)

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        parts = output.view(*output.shape[:2], *sizes)
        carries = carries_BT.view(*carries_BT.shape, *[1] * len(sizes))
        queries, rest = parts.split([1, 2], place)
        return torch.cat([queries, cut(rest, carries)], place).view_as(output)

    return getattr(core, name).register_forward_hook(hook)


@contextmanager
def constant_keys(model: nn.Module, carries_BT: Tensor) -> Iterator[None]:
    """Detach keys and values of positions that carry no gradient, where the attention function reads them."""
    carries, calls = carries_BT[:, None, :, None], []

    def wrap(function: Any, first: int) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(function)
            keys, values = (cut(x, carries) for x in args[first : first + 2])
            return function(*args[:first], keys, values, *args[first + 2 :], **kwargs)

        return run

    module = sys.modules[type(LayerNumbers(model).layers[0]).__module__]
    own = getattr(module, "GPTNeoSelfAttention", None)
    functions = [
        (own, "_attn", 2),
        (nn.functional, "scaled_dot_product_attention", 1),
        (module, "eager_attention_forward", 2),
    ]
    with ExitStack() as stack:
        for owner, name, first in functions:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name), first)))
        fused = [module for module in model.modules() if type(module).__name__ in FUSED]
        for core in fused:
            stack.callback(cut_fused(core, carries_BT).remove)
        yield
    assert len(calls) + len(fused) >= len(LayerNumbers(model).layers)


def step_by_definition(model: nn.Module, batch: Batch, mode: TokenMode) -> Outcome:
    """Run one step with a label for trained positions alone, and with what the mode makes constant."""
    if mode == "exact":
        return plain_step(model, batch)
    with constant_keys(model, batch.carries):
        return plain_step(model, batch)
