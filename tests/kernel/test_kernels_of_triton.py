"""Triton's kernels, without a GPU: their results in the interpreter, and what they are compiled to."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sparsebp_cli.backward.linear import cuda
from sparsebp_cli.backward.linear.function import LinearCost, LinearLayout, Needs
from sparsebp_cli.policy import Blocks, Rows, kernel

ROOT = Path(__file__).parents[2]
HAS_WHEEL = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = [
    pytest.mark.promise("R35"),
    pytest.mark.skipif(not HAS_WHEEL, reason="there is no wheel of Triton for this platform"),
]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """Those of every kernel, found by a process of its own: the interpreter is chosen before Triton is imported."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "tests.kernel.interpreted"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("rows", 7), ("blocks", 16), ("norm", 8), ("2:4", 3), ("check", 3)])
def test_a_kernel_gives_what_its_reference_gives(errors: dict[str, float], kind: str, number: int) -> None:
    found = {case: error for case, error in errors.items() if case.startswith(kind)}
    assert len(found) == number
    limits = {case: 2e-2 if "bfloat16" in case else 1e-6 for case in found}
    assert not {case: error for case, error in found.items() if not error <= limits[case]}


def compile_kernel(function: Any, capability: int, constants: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Return the PTX of a kernel for bfloat16 matrices whose sizes are multiples of 16, and what the assembler says of
    its registers and stack.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {"factor": "*fp32", "powers": "*i32", "totals": "*fp32", "mask": "*i8"}
    types |= dict.fromkeys(("grad", "weight", "x", "out", "score"), "*bf16")
    types |= dict.fromkeys(("index", "across", "down", "start"), "*i64")
    whole = {"num_inputs", "num_outputs", "grad_row", "x_row", "weight_output", "out_row", "out_output", "score_row"}
    whole |= {"mask_row", "block_high", "block_wide", *types}
    options = {key: constants[key] for key in ("num_warps", "num_stages") if key in constants}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    signature, attributes = {}, {}
    for place, name in enumerate(function.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name in whole:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    return compiled.asm["ptx"], done.stdout


UNIT = {"grad_column": 1, "weight_input": 1, "x_column": 1, "out_input": 1}  # strides of neighbours


def find_products(weighted: bool, capability: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the kernels of products with the tiles that they are launched with, blocks of 128 by 128 included."""
    from sparsebp_cli.policy.kernel import blocks, rows

    made = partial(rows.options, dtype=torch.bfloat16)
    for tile in (rows.LARGE, rows.SMALL) if capability == 80 else (rows.WIDE, rows.SMALL):
        yield rows.dgrad_of_rows, made(tile) | UNIT | {"WEIGHTED": weighted}
        yield rows.wgrad_of_rows, made(tile, indirect=True) | UNIT | {"WEIGHTED": weighted}
    for function in (blocks.dgrad_of_blocks, blocks.wgrad_of_blocks):
        yield function, made(blocks.choose_tile(128, 128), indirect=True) | UNIT | {"WEIGHTED": weighted}


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "weighted"), [(80, False), (90, True)])
def test_a_product_is_compiled_for_tensor_cores_without_spills(
    capability: int, weighted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for function, constants in find_products(weighted, capability):
        ptx, resources = compile_kernel(function, capability, constants, tmp_path)
        assert ("wgmma.mma_async" in ptx) == (capability == 90), function
        assert ("mma.sync" in ptx) == (capability == 80), function
        # Asynchronous copies: the next operands are under way while these are multiplied.
        assert len(re.findall(r"cp\.async\.c[ag]", ptx)) >= 4, function
        assert re.findall(r"STACK:(\d+)", resources) == re.findall(r"LOCAL:(\d+)", resources) == ["0"], resources


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_scores_and_small_blocks_are_compiled_without_spills(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsebp_cli.policy.kernel import blocks, rows, score

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    small = rows.options(blocks.choose_tile(32, 32), torch.bfloat16, indirect=True) | UNIT | {"WEIGHTED": True}
    kernels = [
        (score.norm_of_rows, {"grad_column": 1, "WIDTH": score.WIDTH}),
        (score.norm_of_column_parts, {"grad_column": 1, "ROWS": score.ROWS_PER_PART, "HIGH": 16, "WIDE": 128}),
        (score.norm_of_columns, {"WIDE": 128}),
        (score.two_of_four, {"GROUPS": score.GROUPS}),
        (blocks.dgrad_of_blocks, small),
        (blocks.wgrad_of_blocks, small),
    ]
    for function, constants in kernels:
        _, resources = compile_kernel(function, capability, constants, tmp_path)
        assert re.findall(r"STACK:(\d+)", resources) == re.findall(r"LOCAL:(\d+)", resources) == ["0"], resources


def test_without_cuda_pytorch_is_used() -> None:
    assert kernel.find(torch.ones(2, 2)) is None


def test_without_triton_blocks_are_masked_on_cuda_and_counted_as_dense() -> None:
    on_cuda: Any = SimpleNamespace(is_cuda=True)
    with patch.object(kernel, "find", lambda *_, **__: None):
        form, masked = cuda.find_form(Blocks, on_cuda), cuda.find_masked(on_cuda)
    assert form is not None
    assert form(None, torch.ones(2, 2), None, None, None, None) is None
    needs = Needs(dgrad=True, wgrad=True, bias=False)
    assert LinearCost(10.0, needs, LinearLayout(), masked=masked).claim(Blocks, 0.25).claimed_flops == 20.0
    assert LinearCost(10.0, needs, LinearLayout(), masked=masked).claim(Rows, 0.25).claimed_flops == 5.0
