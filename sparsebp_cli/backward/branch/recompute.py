"""Sparse recompute: the forward stores the branch's input; the backward runs the branch again for the kept rows.

The forward runs without a graph. The backward selects rows from the gradient of the branch's output, runs the branch
again on these rows with a graph, differentiates it, and writes the input's gradient into those rows. An MLP computes
each position independently, so nothing else is needed. In an attention the kept queries attend to all keys and values,
which get gradients at all positions. Nothing is approximated.

The branch stores its input and the outputs of its linears, or its input alone and multiplies again (``checkpointing``;
:mod:`sparsebp_cli.backward.branch.stored_outputs`). If a dense step costs 3 F, a share p of the rows costs F (1 + 2 p)
in the first case and at most F (1 + 3 p) in the second, except for the linears of keys and values, whose backward
stays dense.

Shape letters: B examples, T positions, N rows (= B*T), D width, K kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from sparsebp_cli.backward.branch.branch import Branch, Call, autocast_as
from sparsebp_cli.backward.branch.query_rows import Queries, compute_keys_values, is_causal, run_queries
from sparsebp_cli.backward.branch.stored_outputs import record_outputs, replay_outputs
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards
from sparsebp_cli.backward.patch.rng import generators_at
from sparsebp_cli.policy import Rows, Selection

# At 512 positions, chunks of 64, of 128 and of all are within a few percent on two CPU cores: docs/log.md, 2026-11-21.
_QUERIES_AT_ONCE = 128


class RowSelector(Protocol):
    """The site of a branch, as sparse recompute uses it."""

    branch: Branch

    def decide(self, grad_NO: Tensor, batch_shape: torch.Size, call: Call) -> tuple[Tensor, Selection | None]:
        """Return the gradient to use and the selection of it; None for all of it."""


_Result = tuple[Tensor | None, tuple[Tensor | None, ...]]


def differentiate(
    selector: RowSelector, call: Call, x: Tensor, grad: Tensor, parameters: list[nn.Parameter]
) -> _Result:
    """Ask the policy about the gradient of a branch's output, and return those of its input, which must be a leaf, and
    of some parameters.
    """
    branch, wanted = selector.branch, list[Tensor](parameters)
    grad_ND, selection = selector.decide(grad.reshape(-1, grad.shape[-1]), grad.shape[:-1], call)
    with autocast_as(call, x.device), torch.enable_grad():
        if isinstance(selection, Rows) and selection.index_K.numel() == 0:
            return torch.zeros_like(x), tuple(torch.zeros_like(p) for p in wanted)
        if isinstance(selection, Rows) and not call.whole_reason:
            run = _run_rows if branch.attention is None else _run_queries
            return run(branch, call, x, grad_ND, selection, wanted)
        masked_ND = grad_ND if selection is None else selection.apply(grad_ND)
        return _run_whole(branch, call, x, masked_ND.view(grad.shape), wanted)


@final
class SparseRecompute(Function):
    """A branch that saves its input, and whose backward runs it again for the kept rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, selector: RowSelector, call: Call, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.selector, ctx.call, ctx.num_parameters = selector, call, len(parameters)
        with record_outputs(selector.branch, call), selector.branch.dropouts.recording() as call.tape:
            output = selector.branch.run(x, call).detach()
        ctx.kept_names = tuple(call.kept)
        ctx.save_for_backward(x, *call.kept.values())
        call.kept = {}
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * (3 + int(ctx.num_parameters))
        (x, *kept), selector = ctx.saved_tensors, ctx.selector
        x = x.detach().requires_grad_(ctx.needs_input_grad[0])
        call = replace(ctx.call, kept=dict(zip(ctx.kept_names, kept, strict=True)))
        parameters = selector.branch.parameters()
        wanted = [p for p, needs in zip(parameters, ctx.needs_input_grad[3:], strict=True) if needs]
        dx, gradients = differentiate(selector, call, x, grad, wanted)
        given = iter(gradients)
        of_parameters = (next(given) if needs else None for needs in ctx.needs_input_grad[3:])
        result: tuple[object, ...] = (dx if ctx.needs_input_grad[0] else None, None, None, *of_parameters)
        return result


def _run_whole(branch: Branch, call: Call, x: Tensor, grad: Tensor, parameters: list[Tensor]) -> _Result:
    with ExitStack() as stack:
        if call.generators is not None:  # the branch draws random numbers outside of the dropouts on the tape
            stack.enter_context(generators_at(call.generators, x.device))
        else:
            stack.enter_context(branch.dropouts.replaying(call.tape, None))
        stack.enter_context(replace_forwards(replay_outputs(branch, call, None)))
        output = branch.run(x, call)
    return _differentiate([output], x, parameters, [grad])


def _run_rows(branch: Branch, call: Call, x: Tensor, grad_ND: Tensor, rows: Rows, parameters: list[Tensor]) -> _Result:
    x_ND = x.detach().reshape(-1, x.shape[-1])
    x_KD = x_ND.index_select(0, rows.index_K).requires_grad_(x.requires_grad)
    with (
        branch.dropouts.replaying(call.tape, rows.index_K),
        replace_forwards(replay_outputs(branch, call, rows.index_K)),
    ):
        output_KO = branch.run(x_KD[None], call)[0]
    dx_KD, gradients = _differentiate([output_KO], x_KD, parameters, [rows.gather(grad_ND)])
    dx = None if dx_KD is None else torch.zeros_like(x_ND).index_copy_(0, rows.index_K, dx_KD).view(x.shape)
    return dx, gradients


def _run_queries(
    branch: Branch, call: Call, x: Tensor, grad_ND: Tensor, rows: Rows, parameters: list[Tensor]
) -> _Result:
    num_examples, num_positions = x.shape[:2]
    index_BK, grad_BKO = _by_example(rows, grad_ND, num_examples, num_positions)
    first_B1 = torch.arange(num_examples, device=x.device)[:, None] * num_positions
    normed = x if branch.before is None else call_module(branch.before, x)
    with branch.dropouts.replaying(call.tape, None):
        keys, values = compute_keys_values(branch, call, normed)
    outputs, gradients = [], []
    for index_BP, grad_BPO in _split(branch, call, index_BK, grad_BKO):
        position_BP = index_BP - first_B1
        early = not x.is_cuda and is_causal(branch, call) and position_BP.numel() > 0
        num_keys = int(position_BP.max()) + 1 if early else num_positions
        queries = Queries(index_BP, position_BP, num_keys)
        normed_BPD = normed.flatten(0, 1).index_select(0, index_BP.flatten()).view(*index_BP.shape, normed.shape[-1])
        with branch.dropouts.replaying(call.tape, index_BP.flatten()):
            outputs.append(branch.finish(run_queries(branch, call, normed_BPD, queries, keys, values)))
        gradients.append(grad_BPO)
    return _differentiate(outputs, x, parameters, gradients)


def _split(branch: Branch, call: Call, index_BK: Tensor, grad_BKO: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split the queries into chunks where that saves work.

    On a CPU, a chunk of early queries skips the later keys; on an accelerator one large product is faster.
    """
    splits = not index_BK.is_cuda and is_causal(branch, call)
    size = _QUERIES_AT_ONCE if splits else max(1, index_BK.shape[1])
    return zip(torch.split(index_BK, size, 1), torch.split(grad_BKO, size, 1), strict=True)


def _differentiate(
    outputs: Sequence[Tensor], x: Tensor, parameters: list[Tensor], gradients: Sequence[Tensor]
) -> _Result:
    cast = [grad.to(output.dtype) for grad, output in zip(gradients, outputs, strict=True)]
    if not x.requires_grad:
        return None, torch.autograd.grad(outputs, parameters, cast, allow_unused=True)
    dx, *rest = torch.autograd.grad(outputs, [x, *parameters], cast, allow_unused=True)
    return torch.zeros_like(x) if dx is None else dx, tuple(rest)


def _by_example(rows: Rows, grad_ND: Tensor, num_examples: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return row numbers (B, K) and gradients (B, K, O); examples with fewer rows are padded with zero gradients."""
    if num_examples in (1, rows.num_examples):
        return rows.index_K.view(num_examples, -1), rows.gather(grad_ND).view(num_examples, -1, grad_ND.shape[1])
    order = rows.index_K.argsort()
    index_K, grad_KO = rows.index_K[order], rows.gather(grad_ND)[order]
    example_K = index_K // num_positions
    count_B = torch.bincount(example_K, minlength=num_examples)
    most = int(count_B.max())  # synchronises with the device; equal counts return above without that
    place_K = (
        example_K * most + torch.arange(len(index_K), device=index_K.device) - (count_B.cumsum(0) - count_B)[example_K]
    )
    first_B = torch.arange(num_examples, device=index_K.device) * num_positions
    index_BK = first_B.repeat_interleave(most).index_copy(0, place_K, index_K)
    grad_BKO = grad_KO.new_zeros(num_examples * most, grad_KO.shape[1]).index_copy_(0, place_K, grad_KO)
    return index_BK.view(num_examples, most), grad_BKO.view(num_examples, most, grad_KO.shape[1])
