"""Attention as one operation each way, as a fused kernel executes it: scores are neither stored nor read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

torch.library.define("fake_gpu::attend", "(Tensor query, Tensor key, Tensor value, bool causal) -> Tensor")
torch.library.define(
    "fake_gpu::attend_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, bool causal) -> (Tensor, Tensor, Tensor)",
)
torch.library.register_fake("fake_gpu::attend", lambda query, key, value, causal: torch.empty_like(query))  # noqa: ARG005
torch.library.register_fake(
    "fake_gpu::attend_backward",
    lambda grad, query, key, value, causal: tuple(torch.empty_like(x) for x in (query, key, value)),  # noqa: ARG005
)


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.causal = causal
        output: Tensor = torch.ops.fake_gpu.attend(query, key, value, causal)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return *torch.ops.fake_gpu.attend_backward(grad, *ctx.saved_tensors, ctx.causal), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **_: Any
) -> Tensor:
    """Stand in for ``scaled_dot_product_attention``; groups of heads share keys without a copy."""
    causal = is_causal and attn_mask is None and query.shape[2] == key.shape[2]
    output: Tensor = _Attention.apply(query, key, value, causal)  # type: ignore[no-untyped-call]
    return output
