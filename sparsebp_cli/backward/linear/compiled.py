"""A linear of an attached model inside a graph of ``torch.compile``.

Forward and backward are two operators that the compiler does not trace. So the model remains one graph, and the policy
runs when the backward runs, not when it is compiled. Graphs contain the number of a site, and this module finds the
site. Numbers are unique in a process, so a graph that outlives its engine finds no site instead of a wrong one.

Shape letters: N rows (= B*T), D input width, O output width.
"""

from __future__ import annotations

from itertools import count
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.linear.function import (
    Conv1DLayout,
    LinearLayout,
    MatmulLayout,
    Needs,
    WeightLayout,
    autocast,
    differentiate,
    find_order,
    weight_of,
)
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Reading, choice

LAYOUTS: tuple[WeightLayout, ...] = (LinearLayout(), Conv1DLayout(), MatmulLayout())


# Weak references, since numbers are never released, and an engine must not live as long as the process.
_SITES: WeakValueDictionary[int, object] = WeakValueDictionary()
_NUMBERS = count(1)
# CUDA graphs would repeat one captured decision in every backward.
UNSAFE = tuple(t for t in (getattr(torch.Tag, "cudagraph_unsafe", None),) if t is not None)


def register(site: object) -> int:
    """Return the number by which graphs refer to a site, for as long as it lives."""
    number = next(_NUMBERS)
    _SITES[number] = site
    return number


def find_site(number: object) -> object | None:
    """Return the site of a number; None if it no longer exists, or the number is a symbol of the compiler."""
    return _SITES.get(number) if type(number) is int else None


def require_site(number: int) -> object:
    """Return the site of a number; raise :class:`UsageError` if it no longer exists."""
    found = _SITES.get(number)
    if found is None:
        raise UsageError("the backward reached a compiled forward whose engine is detached: run the forward again")
    return found


def run_in_graph(module: nn.Module, x: Tensor, site: int, layout: WeightLayout, reads: frozenset[Reading]) -> Tensor:
    """Run a linear layer while torch.compile traces; ``reads`` are the policy's."""
    weight, bias = weight_of(module), cast("Tensor | None", module.bias)
    needs_grad = any(t is not None and t.requires_grad for t in (x, weight, bias))
    if not (needs_grad and torch.is_grad_enabled()):
        output: Tensor = type(module).forward(module, x)
        return output
    if torch.is_autocast_enabled(x.device.type):  # cast outside of the operator, as in eager mode
        x, weight, bias = autocast(x), autocast(weight), None if bias is None else autocast(bias)
    input_norm = weight_norm = None
    with torch.no_grad():  # the compiler computes norms that several linears read only once
        if "input_norm" in reads:
            input_norm = _norm(x.detach().reshape(-1, x.shape[-1]))
        if "weight_norm" in reads:
            weight_norm = _norm(layout.by_output(weight).detach())
    number, keeps_input = LAYOUTS.index(layout), "input" in reads
    result: Tensor = _linear(x, weight, bias, input_norm, weight_norm, site, number, keeps_input)
    return result


@torch.library.custom_op("sparsebp::norm_of_rows", mutates_args=(), schema="(Tensor matrix) -> Tensor")
def _norm(matrix: Tensor) -> Tensor:
    """Return the norm of each row, as an operator, because its algorithm depends on values and devices."""
    return choice.norm(matrix, 1)


@_norm.register_fake
def _norm_shape(matrix: Tensor) -> Tensor:
    return matrix.new_empty(matrix.shape[0], dtype=torch.promote_types(matrix.dtype, torch.float32))


@torch.library.custom_op(
    "sparsebp::linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? input_norm, Tensor? weight_norm, SymInt site, int layout, "
    "bool keeps_input) -> Tensor",
)
def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_norm: Tensor | None,  # noqa: ARG001  for the backward
    weight_norm: Tensor | None,  # noqa: ARG001
    site: int,  # noqa: ARG001
    layout: int,
    keeps_input: bool,  # noqa: ARG001
) -> Tensor:
    # Contiguous, like the result of the fake function below, since the graph is compiled for these strides.
    return LAYOUTS[layout].forward(x, weight, bias).contiguous()


@_linear.register_fake
def _linear_shape(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    layout: int = others[4]
    return x.new_empty(*x.shape[:-1], weight.shape[LAYOUTS[layout].output_dim])


@torch.library.custom_op(
    "sparsebp::linear_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor? x, Tensor? weight, Tensor? input_norm, Tensor? weight_norm, SymInt site, int layout, "
    "bool[] needs) -> Tensor[]",
    tags=UNSAFE,
)
def _linear_backward(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    input_norm: Tensor | None,
    weight_norm: Tensor | None,
    site: int,
    layout: int,
    needs: list[bool],
) -> list[Tensor]:
    found: Any = require_site(site)
    form = LAYOUTS[layout]
    read: dict[Reading, Tensor | None] = {"input_norm": input_norm, "weight_norm": weight_norm}
    readings = {name: norm for name, norm in read.items() if norm is not None}
    num_inputs, order = _num_inputs(form, x, weight), find_order(form, grad if x is None else x, frozen=x is None)
    dgrad_ND, wgrad, bias_grad = differentiate(
        found.source_of(grad.shape[:-1], readings), grad, x, weight, Needs(*needs), num_inputs, order
    )
    dgrad = None if dgrad_ND is None else dgrad_ND.reshape(*grad.shape[:-1], num_inputs)
    # Contiguous, like the result of the fake function below, since the graph is compiled for these strides.
    return [gradient.contiguous() for gradient in (dgrad, wgrad, bias_grad) if gradient is not None]


def _num_inputs(form: WeightLayout, x: Tensor | None, weight: Tensor | None) -> int:
    """Return D; 0 without input and weight, if only the bias is trained."""
    if x is not None:
        return x.shape[-1]
    return 0 if weight is None else weight.shape[1 - form.output_dim]


@_linear_backward.register_fake
def _linear_backward_shapes(grad: Tensor, x: Tensor | None, weight: Tensor | None, *others: Any) -> list[Tensor]:
    layout, needs = others[3:5]
    form, num_outputs = LAYOUTS[layout], grad.shape[-1]
    made = []
    if needs[0]:
        made.append(grad.new_empty(*grad.shape[:-1], _num_inputs(form, x, weight)))
    if needs[1]:
        sizes = [num_outputs, _num_inputs(form, x, weight)]
        made.append(grad.new_empty(sizes if form.output_dim == 0 else sizes[::-1]))
    if needs[2]:
        made.append(grad.new_empty(num_outputs))
    return made


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, bias, input_norm, weight_norm, site, layout, keeps_input = inputs
    needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
    needs_bias = bias is not None and ctx.needs_input_grad[2]
    ctx.needs, ctx.site, ctx.layout = [needs_dgrad, needs_wgrad, needs_bias], site, layout
    if (found := find_site(site)) is not None:  # the engine reads autograd's graph, which may contain this operator
        ctx.decider, ctx.input_shape = found, x.shape
    # Save only tensors that autograd needs: a frozen weight saves no input. See decision 60.
    kept, multiplied = x if needs_wgrad or keeps_input else None, weight if needs_dgrad else None
    ctx.save_for_backward(kept, multiplied, input_norm, weight_norm)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    made = iter(_linear_backward(grad, *ctx.saved_tensors, ctx.site, ctx.layout, ctx.needs))
    return *(next(made) if needed else None for needed in ctx.needs), *(None,) * 5


_linear.register_autograd(_differentiate, setup_context=_save)
