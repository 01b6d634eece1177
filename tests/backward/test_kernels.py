"""Every fast kernel is the dense backward of the masked gradient."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import sparsebp_cli as sbp
from sparsebp_cli.backward.linear import function
from sparsebp_cli.policy import Blocks, Columns, Elements, Rows, Selection, TwoToFour, choice
from tests.selector import Given

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-2}


def _make_input(batch_shape: list[int], width: int, layout: str, generator: torch.Generator) -> Tensor:
    if layout == "transposed" and len(batch_shape) >= 2:
        swapped = [batch_shape[1], batch_shape[0], *batch_shape[2:]]
        return torch.randn(*swapped, width, generator=generator, dtype=torch.float64).transpose(0, 1)
    if layout == "sliced":
        return torch.randn(*batch_shape, 2 * width, generator=generator, dtype=torch.float64)[..., ::2]
    return torch.randn(*batch_shape, width, generator=generator, dtype=torch.float64)


@st.composite
def selections(draw: st.DrawFn, num_rows: int, num_outputs: int) -> Selection:
    kind = draw(st.sampled_from(["rows", "columns", "blocks", "elements", "2:4"]))
    if kind == "2:4":
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        chosen = choice.choose_two_of_four(torch.rand(num_rows, num_outputs, generator=generator))
        return TwoToFour(chosen.mask_NO, draw(st.sampled_from([1.0, 2.0])))
    block = draw(st.integers(1, num_rows)), draw(st.integers(1, num_outputs))
    num_blocks = -(-num_rows // block[0]) * -(-num_outputs // block[1])
    counts = {"rows": num_rows, "columns": num_outputs, "blocks": num_blocks, "elements": num_rows * num_outputs}
    index = draw(st.permutations(range(counts[kind])))[: draw(st.integers(0, counts[kind]))]
    index_K = torch.tensor(index, dtype=torch.int64)
    if kind == "elements":
        return Elements(index_K, draw(st.sampled_from([1.0, 2.5])))
    weight_K = torch.linspace(0.5, 3.0, len(index)) if draw(st.booleans()) else None
    return (
        Blocks(index_K, block, weight_K)
        if kind == "blocks"
        else {"rows": Rows, "columns": Columns}[kind](index_K, weight_K)
    )


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    batch_shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
    num_outputs = draw(st.integers(1, 9))
    num_rows = int(torch.tensor(batch_shape).prod()) if batch_shape else 1
    return {
        "batch_shape": batch_shape,
        "num_inputs": draw(st.integers(1, 9)),
        "num_outputs": num_outputs,
        "selection": draw(selections(num_rows, num_outputs)),
        "layout": draw(st.sampled_from(["contiguous", "transposed", "sliced"])),
        "kind": draw(st.sampled_from(["linear", "linear without bias", "conv1d"])),
        "dtype": draw(st.sampled_from(list(TOLERANCE))),
        "csr_below": draw(st.sampled_from([0.0, 2.0])),
        "trained": draw(st.sets(st.sampled_from(["input", "weight", "bias"]), min_size=1)),
    }


@settings(max_examples=300, deadline=None, derandomize=True)
@given(case=cases())
def test_fast_kernel_is_dense_on_the_masked_gradient(case: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    num_inputs, num_outputs, dtype = case["num_inputs"], case["num_outputs"], case["dtype"]
    if case["kind"] == "conv1d":
        module: nn.Module = Conv1D(num_outputs, num_inputs)
    else:
        module = nn.Linear(num_inputs, num_outputs, bias=case["kind"] == "linear")
    module.to(dtype)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in case["trained"])
    layout = "contiguous" if case["kind"] == "conv1d" else case["layout"]  # Conv1D takes views only
    x = _make_input(case["batch_shape"], num_inputs, layout, generator).to(dtype)
    x.requires_grad_("input" in case["trained"])
    if not (x.requires_grad or any(p.requires_grad for p in module.parameters())):
        return
    gradient = torch.randn(*x.shape[:-1], num_outputs, generator=generator, dtype=torch.float64).to(dtype)
    selection = case["selection"]

    masked = selection.apply(gradient.reshape(-1, num_outputs)).view(gradient.shape)
    module(x).backward(masked)
    tensors = [x, *module.parameters()]
    expected = [t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    with (
        patch.object(function, "CSR_BELOW", case["csr_below"]),
        sbp.attach(module, [Given(given=selection)]) as engine,
    ):
        engine.backward(module(x), lambda output: output.backward(gradient))
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert (tensor.grad is None) == (wanted is None)
        if wanted is not None:
            scale = max(1.0, float(wanted.abs().max()))
            torch.testing.assert_close(tensor.grad, wanted, rtol=0.0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("name", ["topk", "random"])
@pytest.mark.parametrize("along", ["rows", "columns", "blocks", "elements"])
def test_reference_engine_trains_as_the_fast_one(name: str, along: str) -> None:
    gradients = []
    for engine_name in ("fast", "reference"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
        x = torch.randn(3, 5, 8, dtype=torch.float64)
        with sbp.attach(model, [sbp.make_policy(name, keep=0.3, along=along)], execution=engine_name) as engine:
            engine.backward(model(x).square().sum())
        gradients.append([p.grad for p in model.parameters()])
    for fast, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-12, atol=1e-12)


class _Nothing(Selection):
    def apply(self, grad_NO: Tensor) -> Tensor:
        return torch.zeros_like(grad_NO)

    def num_kept(self, grad_NO: Tensor) -> int:
        return 0


@pytest.mark.parametrize("engine_name", ["fast", "reference"])
def test_a_selection_without_a_kernel_runs_by_its_own_definition(engine_name: str) -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    with sbp.attach(model, [Given(given=_Nothing())], execution=engine_name) as engine:
        engine.backward(model(x).sum())
    assert not model.weight.grad.any()


def test_an_empty_selection_gives_zero_gradients() -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True)
    with sbp.attach(model, [Given(given=Rows(torch.empty(0, dtype=torch.int64)))]) as engine:
        engine.backward(model(x).sum())
    assert not any(t.grad.any() for t in (x, model.weight, model.bias))
