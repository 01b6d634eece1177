"""Sparse recompute: the branch's forward keeps its input alone, its backward runs it again for the kept rows alone.

The forward runs without a graph. In the backward the rows are chosen from the gradient of the branch's output; the
branch runs again on these rows, with a graph, is differentiated, and the gradient of the input is put back into its
rows. An MLP is computed position by position, so that is all. In an attention the kept queries look at all keys and
values, which are computed again for all positions, and get gradients there; nothing is approximated.

Memory is that of activation checkpointing. Of the dense step, 3 F, a share p leaves F (1 + 3 p) plus the keys and
values, which stay dense.

Shape letters: B examples, T positions, N rows (= B*T), D width, K kept.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NoReturn, Protocol, final

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from sparsebp_cli.backward.branch import Branch, Call, autocast_as, call_module, silenced
from sparsebp_cli.backward.dropout import generators_at
from sparsebp_cli.policy import Rows, Selection


class Chooser(Protocol):
    """Who is asked what to keep: the site of a branch."""

    branch: Branch

    def decide(self, grad_NO: Tensor, batch_shape: torch.Size, call: Call) -> tuple[Tensor, Selection | None]:
        """Return the gradient to go on with, and what is kept of it; None for all of it."""


@final
class SparseRecompute(Function):
    """A branch whose backward runs it again for the kept rows. Saves the branch's input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chooser: Chooser, call: Call, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.chooser, ctx.call, ctx.num_parameters = chooser, call, len(parameters)
        ctx.save_for_backward(x)
        with chooser.branch.dropouts.recording() as call.tape:
            return chooser.branch.run(x, call).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * (3 + ctx.num_parameters)
        (x,), chooser, call = ctx.saved_tensors, ctx.chooser, ctx.call
        branch = chooser.branch
        grad_ND, selection = chooser.decide(grad.reshape(-1, grad.shape[-1]), grad.shape[:-1], call)
        wanted = [p for p, needs in zip(branch.parameters(), ctx.needs_input_grad[3:], strict=True) if needs]
        with autocast_as(call, x.device), torch.enable_grad():
            if isinstance(selection, Rows) and call.rows:
                run = _run_rows if branch.attention is None else _run_queries
                dx, gradients = run(branch, call, x, grad_ND, selection, wanted)
            else:
                masked_ND = grad_ND if selection is None else selection.apply(grad_ND)
                dx, gradients = _run_whole(branch, call, x, masked_ND.view(grad.shape), wanted)
        given = iter(gradients)
        return dx if ctx.needs_input_grad[0] else None, None, None, *(
            next(given) if needs else None for needs in ctx.needs_input_grad[3:]
        )


_Result = tuple[Tensor, tuple[Tensor | None, ...]]


def _run_whole(branch: Branch, call: Call, x: Tensor, grad: Tensor, parameters: list[Tensor]) -> _Result:
    x = x.detach().requires_grad_()
    with ExitStack() as stack:
        if call.generators is not None:  # something draws that the tape does not know
            stack.enter_context(generators_at(call.generators, x.device))
        else:
            stack.enter_context(branch.dropouts.replaying(call.tape, None))
        output = branch.run(x, call)
    return _differentiate(output, x, parameters, grad)


def _run_rows(
    branch: Branch, call: Call, x: Tensor, grad_ND: Tensor, rows: Rows, parameters: list[Tensor]
) -> _Result:
    x_ND = x.reshape(-1, x.shape[-1])
    x_KD = x_ND.index_select(0, rows.index_K).requires_grad_()
    with branch.dropouts.replaying(call.tape, rows.index_K):
        output_KO = branch.run(x_KD[None], call)[0]
    dx_KD, gradients = _differentiate(output_KO, x_KD, parameters, rows.gather(grad_ND))
    return torch.zeros_like(x_ND).index_copy_(0, rows.index_K, dx_KD).view(x.shape), gradients


def _run_queries(
    branch: Branch, call: Call, x: Tensor, grad_ND: Tensor, rows: Rows, parameters: list[Tensor]
) -> _Result:
    assert branch.attention is not None
    layout, (num_examples, num_positions) = branch.attention, x.shape[:2]
    index_BK, grad_BKO = _by_example(rows, grad_ND, num_examples, num_positions)
    x = x.detach().requires_grad_()
    normed = x if branch.before is None else call_module(branch.before, x)
    with branch.dropouts.replaying(call.tape, None), silenced(branch.core, layout.query):
        keys_values = _compute_keys_values(branch, call, normed)
    normed_BKD = normed.flatten(0, 1)[index_BK.flatten()].view(*index_BK.shape, -1)
    position_BK = index_BK - torch.arange(num_examples, device=x.device)[:, None] * num_positions
    changes = _take_queries(branch, call, position_BK, num_positions) | {layout.cache: _Given(*keys_values)}
    with branch.dropouts.replaying(call.tape, index_BK.flatten()), silenced(branch.core, layout.key_value):
        output_BKO = branch.finish(branch.run_core(normed_BKD, call, **changes))
    return _differentiate(output_BKO, x, parameters, grad_BKO)


def _differentiate(output: Tensor, x: Tensor, parameters: list[Tensor], grad: Tensor) -> _Result:
    # An empty selection computes nothing, and gives zeros as dense arithmetic on zeros does.
    dx, *gradients = torch.autograd.grad(output, [x, *parameters], grad.to(output.dtype), allow_unused=True)
    return torch.zeros_like(x) if dx is None else dx, tuple(gradients)


def _by_example(rows: Rows, grad_ND: Tensor, num_examples: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return row numbers (B, K) and gradients (B, K, O); an example with fewer rows has zero gradients at the end."""
    if num_examples in (1, rows.num_examples):
        return rows.index_K.view(num_examples, -1), rows.gather(grad_ND).view(num_examples, -1, grad_ND.shape[1])
    order = rows.index_K.argsort()
    index_K, grad_KO = rows.index_K[order], rows.gather(grad_ND)[order]
    example_K = index_K // num_positions
    count_B = torch.bincount(example_K, minlength=num_examples)
    most = int(count_B.max())  # waits for the device: equal parts (Rows.num_examples) do not
    place_K = example_K * most + torch.arange(len(index_K), device=index_K.device) - (count_B.cumsum(0) - count_B)[example_K]
    first_B = torch.arange(num_examples, device=index_K.device) * num_positions
    index_BK = first_B.repeat_interleave(most).index_copy(0, place_K, index_K)
    grad_BKO = grad_KO.new_zeros(num_examples * most, grad_KO.shape[1]).index_copy_(0, place_K, grad_KO)
    return index_BK.view(num_examples, most), grad_BKO.view(num_examples, most, -1)


def _take_queries(branch: Branch, call: Call, position_BK: Tensor, num_positions: int) -> dict[str, Any]:
    """Return the core's arguments for the kept queries."""
    changes: dict[str, Any] = {}
    if call.kwargs.get("position_embeddings") is not None:
        example_B1 = torch.arange(len(position_BK), device=position_BK.device)[:, None]
        changes["position_embeddings"] = tuple(
            part.expand(len(position_BK), -1, -1)[example_B1, position_BK] for part in call.kwargs["position_embeddings"]
        )
    if call.kwargs.get("position_ids") is not None:
        changes["position_ids"] = call.kwargs["position_ids"].expand(len(position_BK), -1).gather(1, position_BK)
    mask = call.kwargs.get("attention_mask")
    if mask is not None:
        index = position_BK[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
        changes["attention_mask"] = mask.expand(len(position_BK), -1, -1, -1).gather(2, index)
    elif _is_causal(branch):
        key = torch.arange(num_positions, device=position_BK.device)
        changes["attention_mask"] = (position_BK[:, :, None] >= key)[:, None]
    return changes


def _is_causal(branch: Branch) -> bool:
    # Without a mask, sdpa is causal by the module's attribute; eager attention then looks everywhere.
    implementation = branch.core.config._attn_implementation  # noqa: SLF001 - the attribute that the cores read
    return implementation == "sdpa" and bool(getattr(branch.core, "is_causal", True))


class _CapturedError(Exception):
    """Ends a core's forward once its keys and values are there."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values


class _Capture:
    """A cache that takes the keys and values and goes no further."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> NoReturn:
        raise _CapturedError(keys, values)


class _Given:
    """A cache that gives keys and values of all positions, whatever is added to it."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


def _compute_keys_values(branch: Branch, call: Call, normed: Tensor) -> tuple[Tensor, Tensor]:
    assert branch.attention is not None
    try:
        branch.run_core(normed, call, **{branch.attention.cache: _Capture()})
    except _CapturedError as captured:
        return captured.keys, captured.values
    raise AssertionError(f"{branch.name} computes without asking its cache")
