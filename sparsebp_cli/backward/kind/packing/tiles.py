"""The loss of a causal language model's head in tiles: a part of the rows at a time, so that their logits never exist
together.

The forward computes the gradients of a tile while its logits exist, and stores them for the rows (U, D) and the head's
weight (V, D) instead of the logits. It does the products of the plain head and its backward, none twice.

Liger-Kernel's fused linear cross entropy (Hsu et al., 2024, https://arxiv.org/abs/2410.10989) and PyTorch's
``linear_cross_entropy`` also compute gradients by tiles of rows in the forward. We differ: rows that several targets
share run once, targets have weights, and logits may be scaled or capped. Decision 128 has measurements of the others.

Shape letters: U rows of the head, I targets, each of a row, K rows of a tile, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsebp_cli.backward.observe.flops import counting_as_backward
from sparsebp_cli.backward.observe.internals import keeps_graph
from sparsebp_cli.errors import UnsupportedError

DTYPES = (torch.float32, torch.bfloat16)  # not float16, where gradients of the unscaled loss would underflow

TWICE = (
    "lossless does not support gradients of gradients (create_graph=True), because its head computes the "
    "gradient in the forward: run this forward inside engine.disabled()"
)


@dataclass(frozen=True)
class Tail:
    """The elementwise change of a model's logits between its head and its loss.

    Args:
        multiplier: Factor of the logits.
        divisor: Divisor of the logits.
        cap: Logits become ``cap * tanh(logits / cap)``; None: no cap.
    """

    multiplier: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    def apply_(self, logits_KV: Tensor) -> Tensor:
        """Scale and cap logits in place for the loss, in transformers' order of operations; return them."""
        if self.multiplier != 1.0:
            logits_KV.mul_(self.multiplier)
        if self.divisor != 1.0:
            logits_KV.div_(self.divisor)
        if self.cap is not None:
            logits_KV.div_(self.cap).tanh_().mul_(self.cap)
        return logits_KV

    def slope(self, read_KV: Tensor) -> Tensor | float:
        """Return the derivative of this change, given the changed logits."""
        slope = self.multiplier / self.divisor
        return slope if self.cap is None else (read_KV / self.cap).square_().neg_().add_(1).mul_(slope)


@dataclass
class TileJob:
    """One loss: the sum over targets of weight times cross entropy.

    Args:
        row_I: The row of each target, ascending.
        label_I: The label of each target.
        weight_I: The weight of each target in the loss, float32.
        ends: For each tile, the number of targets in it and all earlier tiles.
        size: Rows of a tile.
        tail: The change of logits before the loss.
        dtype: The dtype of the products.
        differentiates: Whether to compute gradients.
        keeps: Whether to keep the logits that the loss reads, in ``logits``.
    """

    row_I: Tensor
    label_I: Tensor
    weight_I: Tensor
    ends: list[int]
    size: int
    tail: Tail
    dtype: torch.dtype
    differentiates: bool
    keeps: bool
    logits: list[Tensor] = field(default_factory=list)  # logits of each tile, (K, V)


class TiledLoss(torch.autograd.Function):
    """The loss of a :class:`TileJob`, from rows (U, D), the head's weight (V, D), and its bias (V) or None."""

    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: TileJob) -> Tensor:
        needs = [need and job.differentiates for need in ctx.needs_input_grad[:3]]
        # One product for each of the gradients of rows and weight; the bias' gradient is a sum.
        ctx.products = 2.0 * rows_UD.numel() * weight_VD.shape[0] * sum(needs[:2])
        with torch.autocast(rows_UD.device.type, enabled=False):
            tiles = _Tiles(rows_UD, weight_VD, bias_V, job, needs)
            start, loss = 0, rows_UD.new_zeros((), dtype=torch.float32)
            for number, end in enumerate(job.ends):
                loss += tiles.run(number * job.size, slice(start, end))
                start = end
        ctx.needs, ctx.dtypes = needs, (rows_UD.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        ctx.save_for_backward(*(grad for grad in tiles.grads if grad is not None))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable does not detect a second backward if the loss' own gradient, mostly a 1, has no graph.
        if torch.is_grad_enabled():
            raise UnsupportedError(TWICE)
        (grad,) = grads
        kept = iter(ctx.saved_tensors)
        # Scale in place if no second backward can follow, since a copy would be as large as the head.
        scale = Tensor.mul if keeps_graph() else Tensor.mul_
        found = [
            scale(next(kept), grad).to(dtype) if need else None
            for need, dtype in zip(ctx.needs, ctx.dtypes, strict=True)
        ]
        return (*found, None)


class _Tiles:
    """Computes loss and gradients tile by tile, for a loss whose own gradient is 1."""

    def __init__(
        self, rows_UD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: TileJob, needs: list[bool]
    ) -> None:
        self._rows, self._job, self._needs = rows_UD, job, needs
        self._weight = weight_VD.to(job.dtype)
        self._bias = None if bias_V is None else bias_V.to(job.dtype)
        # Sum over tiles in float32, since bfloat16 would round after each tile.
        self.grads = [
            torch.zeros_like(tensor, dtype=tensor.dtype if place == 0 else torch.float32)
            if tensor is not None and needs[place]
            else None
            for place, tensor in enumerate((rows_UD, weight_VD, bias_V))
        ]

    def run(self, first: int, targets: slice) -> Tensor:
        """Return the loss of the tile that begins at row ``first``, and add its gradients."""
        job = self._job
        rows_KD = self._rows[first : first + job.size].to(job.dtype)
        read_KV = job.tail.apply_(linear(rows_KD, self._weight, self._bias))
        if job.keeps:
            job.logits.append(read_KV.clone())
        read_KV = read_KV.float()
        slope = job.tail.slope(read_KV) if any(self._needs) else 1.0
        row_I, label_I, weight_I = job.row_I[targets] - first, job.label_I[targets], job.weight_I[targets]
        read_KV -= read_KV.amax(1, keepdim=True)
        of_label_I = read_KV[row_I, label_I]
        sum_K = read_KV.exp_().sum(1)
        loss = ((sum_K.log()[row_I] - of_label_I) * weight_I).sum()
        if any(self._needs):
            weight_K = torch.zeros_like(sum_K).index_add_(0, row_I, weight_I)
            grad_KV = read_KV.mul_((weight_K / sum_K)[:, None])
            grad_KV.index_put_((row_I, label_I), -weight_I, accumulate=True)
            if isinstance(slope, Tensor) or slope != 1.0:
                grad_KV *= slope
            self._add(first, rows_KD, grad_KV.to(job.dtype))
        return loss

    def _add(self, first: int, rows_KD: Tensor, grad_KV: Tensor) -> None:
        by_rows, by_weight, by_bias = self.grads
        with counting_as_backward():
            if by_rows is not None:
                by_rows[first : first + len(rows_KD)] = grad_KV @ self._weight
            if by_weight is not None and self._job.dtype == by_weight.dtype:
                torch.addmm(by_weight, grad_KV.T, rows_KD, out=by_weight)  # PyTorch counts addmm, not addmm_
            elif by_weight is not None:
                by_weight += grad_KV.T @ rows_KD
            if by_bias is not None:
                by_bias += grad_KV.sum(0)
