"""Run attention as one operator each way, like a fused kernel, which neither stores nor reads scores."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.flop_counter import register_flop_formula

torch.library.define("fake_gpu::attend", "(Tensor query, Tensor key, Tensor value, bool causal) -> (Tensor, Tensor)")
torch.library.define(
    "fake_gpu::attend_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor logsumexp, bool causal)"
    " -> (Tensor, Tensor, Tensor)",
)


def _make_output(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    batch, heads, rows, _ = query.shape
    # Fused kernels return a position's heads side by side, so the reshape that follows copies nothing.
    output = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(batch, heads, rows, dtype=torch.float32)


def _make_gradients(
    grad: Tensor,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,  # noqa: ARG001
    logsumexp: Tensor,  # noqa: ARG001
    causal: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


torch.library.register_fake("fake_gpu::attend", _make_output)
torch.library.register_fake("fake_gpu::attend_backward", _make_gradients)


# The whole square, causal or not, as in all counts of this package and of PyTorch.
@register_flop_formula(torch.ops.fake_gpu.attend)
def _count_forward(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    return int(2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


@register_flop_formula(torch.ops.fake_gpu.attend_backward)
def _count_backward(grad: object, query: Any, key: Any, value: Any, *_: object, **__: object) -> int:  # noqa: ARG001
    return int(2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1]))


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        output: Tensor
        output, logsumexp = torch.ops.fake_gpu.attend(query, key, value, causal)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.causal = causal
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *torch.ops.fake_gpu.attend_backward(grad, *ctx.saved_tensors, ctx.causal), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **_: Any
) -> Tensor:
    """Replace ``scaled_dot_product_attention``; groups of heads share keys without a copy.

    Args:
        query: (B, H, T, D).
        key: (B, heads of keys, S, D).
        value: The same.
        attn_mask: Which keys a query attends to; None: all, or with ``is_causal`` only earlier ones.
        is_causal: Whether a query attends to no later key.

    Returns:
        (B, H, T, D), without data.
    """
    causal = is_causal and attn_mask is None and query.shape[2] == key.shape[2]
    output: Tensor = _Attention.apply(query, key, value, causal)  # type: ignore[no-untyped-call]
    return output
