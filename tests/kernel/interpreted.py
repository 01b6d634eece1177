"""``python -m tests.kernel.interpreted``: how far each Triton kernel is from its reference, in Triton's interpreter.

Prints JSON: for each case the largest relative error. The interpreter is chosen before Triton is imported, so these run
in a process of their own.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime import interpreter

from sparsebp_cli.backward.linear import cuda
from sparsebp_cli.backward.linear.function import Conv1DLayout, LinearLayout, Needs, WeightLayout
from sparsebp_cli.policy import Blocks, Rows, Selection, choice, kernel
from sparsebp_cli.policy.kernel import check, operation, rows, score

# Type; rows, outputs and inputs: ragged, of whole tiles, less than one; share kept; whether what is kept has weights.
PRODUCTS = (
    (torch.float32, (37, 23, 41), 0.4, True),
    (torch.float32, (32, 32, 64), 0.25, False),
    (torch.float32, (5, 3, 2), 1.0, True),
    (torch.float32, (20, 10, 12), 0.0, False),
    (torch.bfloat16, (37, 23, 41), 0.4, True),
)
BLOCKS = ((9, 7), (16, 16), (40, 40))


def draw(dtype: torch.dtype, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a gradient, a weight (O, D) and an input."""
    generator = torch.Generator().manual_seed(sum(shape))
    num_rows, num_outputs, num_inputs = shape
    sizes = (num_rows, num_outputs), (num_outputs, num_inputs), (num_rows, num_inputs)
    grad, weight, x = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return grad, weight, x


def choose(number: int, keep: float, weighted: bool) -> tuple[Tensor, Tensor | None]:
    """Return a share of the numbers in an order of chance, and weights."""
    generator = torch.Generator().manual_seed(number)
    index_K = torch.randperm(number, generator=generator)[: round(keep * number)]
    return index_K, torch.rand(len(index_K), generator=generator) + 0.5 if weighted else None


def error(found: Tensor | None, expected: Tensor) -> float:
    """Return the norm of the difference over that of the reference; infinity for another shape."""
    if found is None or found.shape != expected.shape:
        return float("inf")
    difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return float(difference if size == 0 else difference / size)


def compare(selection: Selection, layout: WeightLayout, grad_NO: Tensor, weight_OD: Tensor, x_ND: Tensor) -> float:
    """Return the largest error of the three gradients; the reference is dense, of the masked gradient, in float64."""
    masked = selection.apply(grad_NO).double()
    truth = masked @ weight_OD.double(), layout.by_output(masked.T @ x_ND.double()), masked.sum(0)
    weight = layout.by_output(weight_OD).contiguous()
    form = cuda.find_form(type(selection), SimpleNamespace(is_cuda=True))
    assert form is not None
    found = form(layout, grad_NO, x_ND, weight, selection, Needs(True, True, True))
    return max(error(one, other) for one, other in zip(found or (None,) * 3, truth, strict=True))


def run_products() -> Iterator[tuple[str, float]]:
    """Yield the errors of the products of rows and blocks, through the dispatch of CUDA."""
    for dtype, shape, keep, weighted in PRODUCTS:
        grad, weight, x = draw(dtype, shape)
        case = f"{str(dtype).removeprefix('torch.')} {shape} keep {keep} weighted {weighted}"
        yield f"rows {case}", compare(Rows(*choose(shape[0], keep, weighted)), LinearLayout(), grad, weight, x)
        for block in BLOCKS:
            number = -(-shape[0] // block[0]) * -(-shape[1] // block[1])
            index_K, weight_K = choose(number, keep, weighted)
            yield f"blocks {block} {case}", compare(Blocks(index_K, block, weight_K), LinearLayout(), grad, weight, x)
    grad, weight, x = draw(torch.float32, (20, 18, 24))
    index_K, weight_K = choose(20, 0.4, True)
    yield "rows Conv1D", compare(Rows(index_K, weight_K), Conv1DLayout(), grad, weight, x)
    yield "blocks Conv1D", compare(Blocks(choose(9, 0.4, False)[0], (8, 6)), Conv1DLayout(), grad, weight, x)
    grad, x = torch.cat([grad, grad], 1)[:, ::2], torch.cat([x, x], 1)[:, ::2]
    yield "rows strided", compare(Rows(index_K, weight_K), LinearLayout(), grad, weight, x)


def run_scores() -> Iterator[tuple[str, float]]:
    """Yield the errors of norms, of entries whose squares underflow or overflow, too; and of the 2:4 mask, 0 or 1."""
    for dtype, scale in ((torch.float32, 1.0), (torch.float32, 1e-37), (torch.bfloat16, 1e36), (torch.bfloat16, 0.0)):
        grad = (draw(dtype, (40, 70, 1))[0].double() * scale).to(dtype)
        grad[0], grad[:, 0] = 0.0, 0.0
        grad[35, 67] *= 64  # the sum so far is scaled down
        for dim, function in ((1, score.row_norm), (0, score.column_norm)):
            yield f"norm along {dim}, {scale}", error(function(grad), grad.double().norm(dim=dim))
    for dtype, width in ((torch.float32, 23), (torch.bfloat16, 24), (torch.float32, 3)):
        tied = torch.randint(0, 3, (20, width), generator=torch.Generator().manual_seed(width)).to(dtype)
        tied[0, 0], tied[1, 1], tied[2, 2] = float("nan"), float("inf"), -1.0
        same = torch.equal(score.largest_two_of_four(tied), choice.choose_two_of_four(tied).mask_NO)
        yield f"2:4 {dtype} {width}", float(not same)


def run_checks(stand_in: SimpleNamespace) -> Iterator[tuple[str, float]]:
    """Yield how many kernels the check before their first use finds wrong: none, and one that is broken."""
    cpu, broken = torch.device("cpu"), SimpleNamespace(**vars(stand_in))
    yield "check of scores", float(len(check.find_wrong(stand_in, cpu, None)))
    with patch.multiple(check, NUM_ROWS=40, NUM_OUTPUTS=36, NUM_INPUTS=20):
        yield "check of products", float(len(check.find_wrong(stand_in, cpu, torch.bfloat16)))
        broken.wgrad_of_blocks = lambda *args: 1.1 * stand_in.wgrad_of_blocks(*args)
        found = check.find_wrong(broken, cpu, torch.bfloat16)
        yield "check of a wrong kernel", float(set(found) != {"wgrad_of_blocks"})


def read_whole_numbers() -> None:
    """Let Triton 3.6 interpret loops with numpy 2.4, which refuses to make an array of one dimension a number."""
    given = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        given(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


def main() -> None:
    """Print every error."""
    read_whole_numbers()
    stand_in = SimpleNamespace(
        row_norm=score.row_norm,
        column_norm=score.column_norm,
        two_of_four=score.largest_two_of_four,
        dgrad_of_rows=rows.multiply_dgrad,
        wgrad_of_rows=operation._wgrad_of_rows,
        dgrad_of_blocks=operation._dgrad_of_blocks,
        wgrad_of_blocks=operation._wgrad_of_blocks,
    )
    with patch.object(kernel, "find", lambda *_, **__: stand_in):
        found = dict(run_products())
    print(json.dumps(found | dict(run_scores()) | dict(run_checks(stand_in))))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
