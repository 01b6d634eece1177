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

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from sparsebp_cli.backward.branch.branch import Branch, Call, autocast_as
from sparsebp_cli.backward.branch.query_rows import Queries, compute_keys_values, is_causal, run_queries
from sparsebp_cli.backward.branch.stored_outputs import record_outputs, replay_outputs
from sparsebp_cli.backward.decoder.kept_queries import ChunkedAttention, KeptQueries
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards
from sparsebp_cli.backward.patch.rng import generators_at
from sparsebp_cli.policy import Rows, Selection

# Of 32, 64 and 128 queries at once none was faster on a CPU: docs/log.md, 2026-11-25.
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
        # None stays None: zeros would make the backward run the branch again, for nothing.
        ctx.set_materialize_grads(False)
        ctx.selector, ctx.call, ctx.num_parameters = selector, call, len(parameters)
        with record_outputs(selector.branch, call), selector.branch.dropouts.recording() as call.tape:
            output = selector.branch.run(x, call).detach()
        ctx.kept_names = tuple(call.kept)
        # By autograd, which finds changes in place, and whose hooks see what is kept; attributes would hide both.
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
    return _differentiate(output, x, parameters, grad)


def _run_rows(branch: Branch, call: Call, x: Tensor, grad_ND: Tensor, rows: Rows, parameters: list[Tensor]) -> _Result:
    x_ND = x.detach().reshape(-1, x.shape[-1])
    x_KD = x_ND.index_select(0, rows.index_K).requires_grad_(x.requires_grad)
    with (
        branch.dropouts.replaying(call.tape, rows.index_K),
        replace_forwards(replay_outputs(branch, call, rows.index_K)),
    ):
        # As a batch of one example, since modules take (B, T, D).
        output_KO = branch.run(x_KD[None], call)[0]
    dx_KD, gradients = _differentiate(output_KO, x_KD, parameters, rows.gather(grad_ND))
    dx = None if dx_KD is None else torch.zeros_like(x_ND).index_copy_(0, rows.index_K, dx_KD).view(x.shape)
    return dx, gradients


def _run_queries(
    branch: Branch, call: Call, x: Tensor, grad_ND: Tensor, rows: Rows, parameters: list[Tensor]
) -> _Result:
    num_examples, num_positions = x.shape[:2]
    kept, grad_BKO = _by_example(rows, grad_ND, num_examples, num_positions)
    index_BK, position_BK = kept.index_BK, kept.positions(num_positions)
    normed = x if branch.before is None else call_module(branch.before, x)
    with branch.dropouts.replaying(call.tape, None):
        keys, values = compute_keys_values(branch, call, normed)
    index_K = index_BK.flatten()
    normed_BKD = normed.flatten(0, 1).index_select(0, index_K).view(*index_BK.shape, normed.shape[-1])
    # On an accelerator one large product is faster than several that skip keys.
    skips = not x.is_cuda and is_causal(branch, call) and index_K.numel() > 0
    chunks = ChunkedAttention(position_BK, _QUERIES_AT_ONCE) if skips else nullcontext()
    with branch.dropouts.replaying(call.tape, index_K), chunks:
        queries = Queries(index_BK, position_BK)
        output_BKO = branch.finish(run_queries(branch, call, normed_BKD, queries, keys, values))
    return _differentiate(output_BKO, x, parameters, grad_BKO)


def _differentiate(output: Tensor, x: Tensor, parameters: list[Tensor], grad: Tensor) -> _Result:
    grad = grad.to(output.dtype)
    if not x.requires_grad:
        return None, torch.autograd.grad(output, parameters, grad, allow_unused=True)
    dx, *rest = torch.autograd.grad(output, [x, *parameters], grad, allow_unused=True)
    return torch.zeros_like(x) if dx is None else dx, tuple(rest)


def _by_example(rows: Rows, grad_ND: Tensor, num_examples: int, num_positions: int) -> tuple[KeptQueries, Tensor]:
    """Return the rows as queries and their gradients (B, K, O)."""
    if num_examples in (1, rows.num_examples):  # else the numbers of rows must be read from the device
        kept = KeptQueries(rows.index_K.view(num_examples, -1))
        return kept, kept.spread(rows.gather(grad_ND))
    order = rows.index_K.argsort()
    rows = Rows(rows.index_K[order], None if rows.weight_K is None else rows.weight_K[order])
    kept = KeptQueries.of(rows.index_K, num_examples, num_positions)
    return kept, kept.spread(rows.gather(grad_ND))
