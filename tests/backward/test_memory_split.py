"""The memory of one step, to the byte: against what is calculated by hand, and against the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import sparsebp_cli as sbp
from sparsebp_cli.backward import MemoryTrace, saved_bytes, tensor_bytes
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.run.memory import PARTS, MemoryCurve, MemoryPoint, MemorySplit

from .conftest import tiny_model, tokens

FLOAT, ROWS = 4, 32
WIDTHS = (8, 16, 4, 64)


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """What another test left is not collected in the middle of a step."""
    gc.collect()


def _stack(*, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=False, dtype=dtype) for a, b in pairwise(WIDTHS)))


def _trace(model: nn.Module, optimizer: Any, run: Callable[[], object]) -> MemoryTrace:
    with sbp.memory_trace(model, optimizer) as trace:
        run()
    return trace


def _pass(model: nn.Module, ids: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Callable[[], None]:
    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return run


def _in_order(curve: MemoryCurve, part: str) -> list[int]:
    """A part's bytes, each value once as long as it stays."""
    values = [getattr(point.split, part) for point in curve.points]
    return [value for n, value in enumerate(values) if n == 0 or values[n - 1] != value]


def _last(curve: MemoryCurve) -> MemorySplit:
    return curve.points[-1].split


def _step(model: nn.Module, optimizer: torch.optim.Optimizer | None, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        output = model(x)
        output.sum().backward()
        del output
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_stack_of_linears_takes_what_is_calculated_by_hand_at_every_moment(dtype: torch.dtype) -> None:
    model, size = _stack(dtype=dtype), dtype.itemsize
    optimizer = torch.optim.AdamW(model.parameters())
    weights = [size * a * b for a, b in pairwise(WIDTHS)]
    inputs = [size * ROWS * width for width in WIDTHS[:-1]]
    state = 2 * sum(weights) + FLOAT * len(weights)  # two moments, and a count that is float32
    x = torch.randn(ROWS, WIDTHS[0], dtype=dtype)
    for number in range(3):
        curve = _trace(model, optimizer, _step(model, optimizer, x)).curve
        assert _in_order(curve, "weights") == [sum(weights)]
        # The input is there from the start to the end; the backward lets go of the others, the last first.
        forward = [sum(inputs[: n + 1]) for n in range(len(inputs))]
        assert _in_order(curve, "activations") == [*forward, *reversed(forward[:-1])]
        arriving = [0, *(sum(weights[-n:]) for n in range(1, len(weights) + 1))]
        leaving = [sum(weights[n:]) for n in range(1, len(weights) + 1)]
        assert _in_order(curve, "gradients") == [*arriving, *leaving]
        states = _in_order(curve, "optimizer")
        assert (states[0], states[-1]) == ((0, state) if number == 0 else (state, state))
        assert number == 0 or states == [state]
        assert _last(curve) == MemorySplit(sum(weights), 0, state, inputs[0], 0)
        assert [point.phase for n, point in enumerate(curve.points) if curve.points[n - 1].phase != point.phase] == [
            "forward",
            "backward",
            "update",
        ]


def test_the_peak_and_the_workspace_beside_it_are_calculated_by_hand() -> None:
    """At the last layer's backward: its output and the gradient of it are there, as is all that was saved."""
    wide = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 5, bias=False))
    x, weight = torch.randn(ROWS, 4), FLOAT * 6 * 5
    upper = torch.randn(ROWS, 5)
    curve = _trace(wide, None, lambda: wide(x).backward(upper)).curve
    assert curve.peak.phase == "backward"
    assert curve.peak.split == MemorySplit(
        weights=FLOAT * (4 * 6 + 6 * 5),
        gradients=weight,
        activations=FLOAT * ROWS * (4 + 6),
        workspace=FLOAT * ROWS * (6 + 5),  # the gradient of what is between; the output, which the caller's call holds
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_every_byte_of_a_transformer_is_the_allocators(family: str) -> None:
    """Beyond what was there before: the parts together rise and fall as the allocator says, at each of its changes."""
    model = tiny_model(family)
    optimizer = torch.optim.AdamW(model.parameters())
    run = _pass(model, tokens(0), optimizer)
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    live, told = 0, []
    assert record.profiler is not None
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            told.append(live)
    curve = _trace(model, optimizer, run).curve
    before = curve.points[0].split.total
    assert max(told) > 100_000
    assert [point.split.total - before for point in curve.points[1:]] == told


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_activations_after_the_forward_are_what_autograd_says_it_saves(family: str) -> None:
    model, ids = tiny_model(family), tokens(0)
    with saved_bytes([*model.parameters(), *model.buffers()]) as saved:
        loss = model(input_ids=ids, labels=ids).loss
    del loss
    curve = _trace(model, None, _pass(model, ids)).curve
    assert max(p.split.activations for p in curve.points if p.phase == "forward") == saved.total


def test_tied_weights_views_and_what_is_changed_in_place_count_once() -> None:
    model = tiny_model("gpt2")  # the head is the embedding
    ids = tokens(0)
    curve = _trace(model, None, _pass(model, ids)).curve
    assert _last(curve).weights == tensor_bytes([*model.parameters(), *model.buffers()])
    assert _last(curve).gradients == tensor_bytes(model.parameters())
    weight = nn.Parameter(torch.randn(8, 8))
    holder = nn.Module()
    holder.weight = weight

    def run() -> None:
        h = torch.randn(ROWS, 8) @ weight
        h.relu_().view(-1, 4).mul_(2.0)[:, :2].sigmoid_()
        h.view(2, -1).sum().backward()

    curve = _trace(holder, None, run).curve
    assert curve.highest.activations == FLOAT * ROWS * (8 + 8 + 4 * 2 // 2) - FLOAT * ROWS * 4  # x, h; sigmoid saves h
    assert _last(curve) == MemorySplit(weights=256, gradients=256)


def test_what_was_there_before_counts_where_it_is_named_and_until_it_goes() -> None:
    model, x, teacher = _stack(), torch.randn(ROWS, WIDTHS[0]), [{"mean": torch.randn(100)}]
    with sbp.memory_trace(model, also=teacher) as trace:
        teacher[0]["mean"] = torch.randn(10)
        model(x)
    assert trace.curve.points[0].split.workspace == FLOAT * 100
    assert _last(trace.curve).workspace == FLOAT * 10


def test_gradients_of_before_count_and_their_end_is_seen() -> None:
    model = _stack()
    whole = tensor_bytes(model.parameters())
    x = torch.randn(ROWS, WIDTHS[0])
    model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        model(x).sum().backward()  # added to those that are there: the second ones are on their way
        optimizer.zero_grad()

    curve = _trace(model, optimizer, run).curve
    assert curve.points[0].split.gradients == whole
    assert curve.highest.gradients == whole
    assert _last(curve).gradients == 0
    assert max(p.split.workspace for p in curve.points if p.phase == "backward") >= FLOAT * 16 * 8


def test_an_eager_update_holds_one_gradient_at_a_time() -> None:
    """Its own hook takes the gradient away: it is seen before."""
    model, x = _stack(), torch.randn(ROWS, WIDTHS[0])
    each = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        each[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    curve = _trace(model, None, _step(model, None, x)).curve
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert _in_order(curve, "gradients") == [0, *(size for n in sizes[::-1] for size in (n, 0))]


def test_segments_save_less_at_once_and_an_eager_update_keeps_the_largest_gradient_alone() -> None:
    model, ids = tiny_model("llama", num_hidden_layers=4), tokens(0)
    optimizer = torch.optim.AdamW(model.parameters())
    highest = {}
    for key, options in {"plain": {}, "segments": {"segments": 4}, "eager": {"update": "eager"}}.items():
        with sbp.attach(model, [], optimizer=optimizer, **options) as engine:
            curve = _trace(model, optimizer, _attached_step(engine, model, ids, optimizer)).curve
        highest[key] = curve.highest
        assert _last(curve).gradients == 0
    assert highest["plain"].gradients == highest["segments"].gradients == tensor_bytes(model.parameters())
    assert highest["eager"].gradients == max(parameter.nbytes for parameter in model.parameters())
    assert highest["segments"].activations < highest["plain"].activations / 2
    assert highest["eager"].activations == highest["plain"].activations
    assert highest["eager"].optimizer == highest["segments"].optimizer == highest["plain"].optimizer


def _attached_step(
    engine: sbp.Engine, model: nn.Module, ids: Tensor, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    def run() -> None:
        engine.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()

    return run


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_saves_inputs_in_the_forward_and_the_rest_one_block_at_a_time(reentrant: bool) -> None:
    torch.manual_seed(0)
    width, number = 16, 4
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 3 * width), nn.Linear(3 * width, width)) for _ in range(4))

    def run() -> None:
        h = torch.randn(ROWS, width, requires_grad=True)
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=reentrant)
        h.sum().backward()

    curve = _trace(blocks, None, run).curve
    one = FLOAT * ROWS * width
    assert max(p.split.activations for p in curve.points if p.phase == "forward") == number * one
    backward = [p.split.activations for p in curve.points if p.phase == "backward"]
    assert max(backward) == number * one + 3 * one
    assert _last(curve).gradients == tensor_bytes(blocks.parameters())


@pytest.mark.parametrize("checkpointing", ["none", "sparse"])
def test_a_branch_that_runs_again_saves_what_its_function_keeps(checkpointing: str) -> None:
    model, ids = tiny_model("llama"), tokens(0)
    policy = sbp.make_policy("topk", keep=0.25)
    with sbp.attach(model, [policy], sites="branches", checkpointing=checkpointing) as engine:
        with saved_bytes([*model.parameters(), *model.buffers()]) as saved:
            loss = model(input_ids=ids, labels=ids).loss
        del loss
        curve = _trace(model, None, lambda: engine.backward(model(input_ids=ids, labels=ids).loss)).curve
    angles = 2 * FLOAT * ids.shape[1] * 8  # rotary; held as arguments, saved when the branch runs again
    assert max(p.split.activations for p in curve.points if p.phase == "forward") == saved.total + angles
    dense = _trace(model, None, _pass(model, ids)).curve
    assert curve.highest.activations < dense.highest.activations


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks by an old name
def test_weights_of_lora_are_all_weights_and_only_the_adapters_have_gradients() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    ids, trained = tokens(0), [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)

    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    curve = _trace(model, optimizer, run).curve
    assert _last(curve).weights == tensor_bytes([*model.parameters(), *model.buffers()])
    assert _last(curve).gradients == tensor_bytes(trained)
    assert _last(curve).optimizer == 2 * tensor_bytes(trained) + FLOAT * len(trained)


def test_a_weight_that_wraps_others_is_what_they_hold() -> None:
    linear = nn.Linear(8, 4, bias=False)
    linear.weight = nn.Parameter(TwoTensor(torch.randn(4, 8), torch.randn(4, 8)))
    x = torch.randn(ROWS, 8)
    curve = _trace(linear, None, lambda: linear(x).sum().backward()).curve
    assert _last(curve) == MemorySplit(2 * FLOAT * 32, 2 * FLOAT * 32, activations=FLOAT * ROWS * 8)  # x is still there


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support:UserWarning")  # beta, says PyTorch once a process
@pytest.mark.parametrize("make", [torch.sparse_csr_tensor, torch.sparse_csc_tensor, torch.sparse_coo_tensor])
def test_sparse_tensors_are_their_indices_and_values(make: Callable[..., Tensor]) -> None:
    plain, values = torch.arange(6), torch.ones(6)
    given = (torch.stack([plain, plain]),) if make is torch.sparse_coo_tensor else (torch.arange(7), plain)
    state = make(*given, values, (6, 6), check_invariants=True)
    with sbp.memory_trace(_stack(), also=[state]) as trace:
        pass
    assert trace.peak.split.workspace == 8 * sum(index.numel() for index in given) + FLOAT * 6


def test_a_compiled_model_is_traced_too() -> None:
    model, x = _stack(), torch.randn(ROWS, WIDTHS[0])
    compiled: Any = torch.compile(model, backend="aot_eager")
    compiled(x).sum().backward()
    model.zero_grad()
    plain = _trace(model, None, _step(model, None, x)).curve
    model.zero_grad()
    curve = _trace(compiled, None, _step(compiled, None, x)).curve
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

    model = _stack()
    optimizer = Optimizer(model.parameters(), lr=0.1)
    curve = _trace(model, optimizer, _step(model, optimizer, torch.randn(ROWS, WIDTHS[0]))).curve
    assert _last(curve).optimizer == 3 * FLOAT * 55


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("gpt2", {"resid_pdrop": 0.1}), ("gemma2", {})])
def test_a_traced_training_is_the_plain_one_bit_for_bit(family: str, options: dict[str, Any]) -> None:
    weights = []
    for traced in (False, True):
        model = tiny_model(family, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            run = _pass(model, tokens(number), optimizer)
            _trace(model, optimizer, run) if traced else run()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_phases_come_again_with_accumulation_and_can_be_told() -> None:
    model, x = _stack(), torch.randn(ROWS, WIDTHS[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for _ in range(2):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    curve = _trace(model, optimizer, run).curve
    phases = [p.phase for n, p in enumerate(curve.points) if n == 0 or curve.points[n - 1].phase != p.phase]
    assert phases == ["forward", "backward", "forward", "backward", "update"]
    with sbp.memory_trace(model, optimizer) as trace:
        model(x).sum().backward()
        trace.begin("update")
        optimizer.zero_grad()
    assert {point.phase for point in trace.curve.points} == {"forward", "update"}


def test_a_step_that_fails_has_its_curve_and_leaves_no_hook() -> None:
    model, x = _stack(), torch.randn(ROWS, WIDTHS[0])
    trace = sbp.memory_trace(model)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), trace:
        nn.Sequential(model[0], model[0])(x)
    assert trace.curve.highest.activations == FLOAT * ROWS * (8 + 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
        model(x).sum().backward()
    with pytest.raises(UsageError, match="make another one"), trace:
        pass


def test_what_cannot_be_traced_is_refused_in_one_line() -> None:
    model = _stack()
    with pytest.raises(UnsupportedError, match="on cpu and cuda, got meta"):
        sbp.memory_trace(model, device="meta")
    with pytest.raises(UnsupportedError, match=r"must be a torch.optim.Optimizer, got str"):
        sbp.memory_trace(model, "adamw")
    with pytest.raises(UsageError, match="when its block has ended"):
        _ = sbp.memory_trace(model).curve
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(UsageError, match="a profiler of PyTorch runs"):
        _trace(model, None, lambda: None)
    assert _trace(model, None, lambda: None).allocator_peak_bytes is None
    assert _trace(model, None, lambda: None).peak.split == MemorySplit(weights=tensor_bytes(model.parameters()))


def test_a_thinned_curve_keeps_peak_and_ends_and_survives_the_journal() -> None:
    points = [MemoryPoint(n / 1e6, "forward", MemorySplit(workspace=n * 37 % 101)) for n in range(5000)]
    points[1234] = MemoryPoint(1234 / 1e6, "backward", MemorySplit(weights=500))
    curve = MemoryCurve(tuple(points))
    thin = curve.thin(40)
    assert len(thin.points) <= 40
    assert thin.peak == curve.peak == points[1234]
    assert (thin.points[0], thin.points[-1]) == (points[0], points[-1])
    assert MemoryCurve.from_values(curve.to_values()) == curve.thin()
    assert curve.to_values()["columns"] == ["microseconds", "phase", *PARTS]


def test_the_picture_is_a_file_and_any_other_name_is_refused(tmp_path: Path) -> None:
    model, x = _stack(), torch.randn(ROWS, WIDTHS[0])
    trace = _trace(model, None, _step(model, None, x))
    assert trace.save(tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    first, second = (trace.save(tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    for word in (b"saved activations", b"workspace", b"optimizer state"):
        assert word in first or b"<text" not in first
    with pytest.raises(UsageError, match=r"must end in .png"):
        trace.save(tmp_path / "memory.txt")
