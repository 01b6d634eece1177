"""Tracing the memory of anybody's step: phases, failures, what is named, the curve as data and as a picture."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_case import FLOAT, ROWS, WIDTHS, last, one_pass, one_step, stack, trace_step
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor

from sparsebp_cli.backward import tensor_bytes
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_tools.memory import MemorySplit, memory_trace
from tests.backward.conftest import tiny_model, tokens


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """What another test left is not collected in the middle of a step."""
    gc.collect()


def test_what_was_there_before_counts_where_it_is_named_and_until_it_goes() -> None:
    model, x, teacher = stack(), torch.randn(ROWS, WIDTHS[0]), [{"mean": torch.randn(100)}]
    with memory_trace(model, also=teacher) as trace:
        teacher[0]["mean"] = torch.randn(10)
        model(x)
    assert trace.curve.points[0].split.workspace == FLOAT * 100
    assert last(trace.curve).workspace == FLOAT * 10


def test_a_weight_that_wraps_others_is_what_they_hold() -> None:
    linear = nn.Linear(8, 4, bias=False)
    linear.weight = nn.Parameter(TwoTensor(torch.randn(4, 8), torch.randn(4, 8)))
    x = torch.randn(ROWS, 8)
    curve = trace_step(linear, None, lambda: linear(x).sum().backward()).curve
    assert last(curve) == MemorySplit(2 * FLOAT * 32, 2 * FLOAT * 32, activations=FLOAT * ROWS * 8)  # x is still there


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # torch 2.11
@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support:UserWarning")  # beta, says PyTorch once a process
@pytest.mark.parametrize("make", [torch.sparse_csr_tensor, torch.sparse_csc_tensor, torch.sparse_coo_tensor])
def test_sparse_tensors_are_their_indices_and_values(make: Callable[..., Tensor]) -> None:
    plain, values = torch.arange(6), torch.ones(6)
    given = (torch.stack([plain, plain]),) if make is torch.sparse_coo_tensor else (torch.arange(7), plain)
    state = make(*given, values, (6, 6), check_invariants=True)
    with memory_trace(stack(), also=[state]) as trace:
        pass
    assert trace.peak.split.workspace == 8 * sum(index.numel() for index in given) + FLOAT * 6


@pytest.mark.compiles
def test_a_compiled_model_is_traced_too() -> None:
    model, x = stack(), torch.randn(ROWS, WIDTHS[0])
    compiled: Any = torch.compile(model, backend="aot_eager")
    compiled(x).sum().backward()
    model.zero_grad()
    plain = trace_step(model, None, one_step(model, None, x)).curve
    model.zero_grad()
    curve = trace_step(compiled, None, one_step(compiled, None, x)).curve
    assert {point.phase for point in curve.points} == {"forward", "backward"}
    assert curve.highest.gradients == plain.highest.gradients
    assert curve.highest.activations == plain.highest.activations


def test_state_in_objects_of_an_optimizer_is_state() -> None:
    class Projector:
        def __init__(self) -> None:
            self.matrix = torch.ones(50)

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] = {"projector": Projector(), "nested": [{"a": torch.ones(5)}, 3]}
            return super().step(closure)

    model = stack()
    optimizer = Optimizer(model.parameters(), lr=0.1)
    curve = trace_step(model, optimizer, one_step(model, optimizer, torch.randn(ROWS, WIDTHS[0]))).curve
    assert last(curve).optimizer == 3 * FLOAT * 55


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("gpt2", {"resid_pdrop": 0.1}), ("gemma2", {})])
def test_a_traced_training_is_the_plain_one_bit_for_bit(family: str, options: dict[str, Any]) -> None:
    weights = []
    for traced in (False, True):
        model = tiny_model(family, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            run = one_pass(model, tokens(number), optimizer)
            trace_step(model, optimizer, run) if traced else run()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_phases_come_again_with_accumulation_and_can_be_told() -> None:
    model, x = stack(), torch.randn(ROWS, WIDTHS[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for _ in range(2):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    curve = trace_step(model, optimizer, run).curve
    phases = [p.phase for n, p in enumerate(curve.points) if n == 0 or curve.points[n - 1].phase != p.phase]
    assert phases == ["forward", "backward", "forward", "backward", "update"]
    with memory_trace(model, optimizer) as trace:
        model(x).sum().backward()
        trace.begin("update")
        optimizer.zero_grad()
    assert {point.phase for point in trace.curve.points} == {"forward", "update"}


def test_a_step_that_fails_has_its_curve_and_leaves_no_hook() -> None:
    model, x = stack(), torch.randn(ROWS, WIDTHS[0])
    trace = memory_trace(model)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), trace:
        nn.Sequential(model[0], model[0])(x)
    assert trace.curve.highest.activations == FLOAT * ROWS * (8 + 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
        model(x).sum().backward()
    with pytest.raises(UsageError, match="create another one"), trace:
        pass


def test_what_cannot_be_traced_is_refused_in_one_line() -> None:
    model = stack()
    with pytest.raises(UnsupportedError, match="on cpu and cuda, got meta"):
        memory_trace(model, device="meta")
    with pytest.raises(UnsupportedError, match=r"must be a torch.optim.Optimizer, got str"):
        memory_trace(model, "adamw")
    with pytest.raises(UsageError, match="read them after the with block"):
        _ = memory_trace(model).curve
    with (
        profile(activities=[ProfilerActivity.CPU], acc_events=True),
        pytest.raises(UsageError, match="a profiler of PyTorch runs"),
    ):
        trace_step(model, None, lambda: None)
    assert trace_step(model, None, lambda: None).allocator_peak_bytes is None
    assert trace_step(model, None, lambda: None).peak.split == MemorySplit(weights=tensor_bytes(model.parameters()))


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (lambda: memory_trace(None), "model must be an nn.Module, got NoneType"),
        (lambda: memory_trace(stack(), device="nowhere"), "device must be cpu, cuda or cuda:NUMBER, got 'nowhere'"),
        (lambda: memory_trace(stack(), device="cuda:99"), "device must be a device of this machine, got 'cuda:99'"),
        (lambda: memory_trace(stack()).begin("update"), "inside the with block"),
        (lambda: memory_trace(stack()).begin("rest"), "phase must be one of forward, backward, update, got 'rest'"),
    ],
)
def test_bad_use_is_one_line(misuse: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        misuse()


def test_the_picture_is_a_file_and_any_other_name_is_refused(tmp_path: Path) -> None:
    model, x = stack(), torch.randn(ROWS, WIDTHS[0])
    trace = trace_step(model, None, one_step(model, None, x))
    assert trace.save(tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    first, second = (trace.save(tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    for word in (b"saved activations", b"workspace", b"optimizer state"):
        assert word in first or b"<text" not in first
    with pytest.raises(UsageError, match=r"must end in .png"):
        trace.save(tmp_path / "memory.txt")
