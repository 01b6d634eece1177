"""The memory of one step, to the byte: against what is calculated by hand, and against the allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from memory_case import FLOAT, ROWS, WIDTHS, in_order, last, one_pass, one_step, stack, trace_step
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import sparsebp_cli as sbp
from sparsebp_cli.backward import saved_bytes, tensor_bytes
from sparsebp_tools.memory import MemorySplit
from tests.backward.conftest import tiny_model, tokens


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """What another test left is not collected in the middle of a step."""
    gc.collect()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_stack_of_linears_takes_what_is_calculated_by_hand_at_every_moment(dtype: torch.dtype) -> None:
    model, size = stack(dtype=dtype), dtype.itemsize
    optimizer = torch.optim.AdamW(model.parameters())
    weights = [size * a * b for a, b in pairwise(WIDTHS)]
    inputs = [size * ROWS * width for width in WIDTHS[:-1]]
    state = 2 * sum(weights) + FLOAT * len(weights)  # two moments, and a count that is float32
    x = torch.randn(ROWS, WIDTHS[0], dtype=dtype)
    for number in range(3):
        curve = trace_step(model, optimizer, one_step(model, optimizer, x)).curve
        assert in_order(curve, "weights") == [sum(weights)]
        # The input is there from the start to the end; the backward lets go of the others, the last first.
        forward = [sum(inputs[: n + 1]) for n in range(len(inputs))]
        assert in_order(curve, "activations") == [*forward, *reversed(forward[:-1])]
        arriving = [0, *(sum(weights[-n:]) for n in range(1, len(weights) + 1))]
        leaving = [sum(weights[n:]) for n in range(1, len(weights) + 1)]
        assert in_order(curve, "gradients") == [*arriving, *leaving]
        states = in_order(curve, "optimizer")
        assert (states[0], states[-1]) == ((0, state) if number == 0 else (state, state))
        assert number == 0 or states == [state]
        assert last(curve) == MemorySplit(sum(weights), 0, state, inputs[0], 0)
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
    curve = trace_step(wide, None, lambda: wide(x).backward(upper)).curve
    assert curve.peak.phase == "backward"
    assert curve.peak.split == MemorySplit(
        weights=FLOAT * (4 * 6 + 6 * 5),
        gradients=weight,
        activations=FLOAT * ROWS * (4 + 6),
        workspace=FLOAT * ROWS * (6 + 5),  # the gradient of what is between; the output, which the caller's call holds
    )


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # PyTorch 2.11, once
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_every_byte_of_a_transformer_is_the_allocators(family: str) -> None:
    """Beyond what was there before: the parts together rise and fall as the allocator says, at each of its changes."""
    model = tiny_model(family)
    optimizer = torch.optim.AdamW(model.parameters())
    run = one_pass(model, tokens(0), optimizer)
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    live, told = 0, []
    assert record.profiler is not None
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            told.append(live)
    curve = trace_step(model, optimizer, run).curve
    before = curve.points[0].split.total
    assert max(told) > 100_000
    assert [point.split.total - before for point in curve.points[1:]] == told


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_activations_after_the_forward_are_what_autograd_says_it_saves(family: str) -> None:
    model, ids = tiny_model(family), tokens(0)
    with saved_bytes([*model.parameters(), *model.buffers()]) as saved:
        loss = model(input_ids=ids, labels=ids).loss
    del loss
    curve = trace_step(model, None, one_pass(model, ids)).curve
    assert max(p.split.activations for p in curve.points if p.phase == "forward") == saved.total


def test_tied_weights_views_and_what_is_changed_in_place_count_once() -> None:
    model = tiny_model("gpt2")  # the head is the embedding
    ids = tokens(0)
    curve = trace_step(model, None, one_pass(model, ids)).curve
    assert last(curve).weights == tensor_bytes([*model.parameters(), *model.buffers()])
    assert last(curve).gradients == tensor_bytes(model.parameters())
    weight = nn.Parameter(torch.randn(8, 8))
    holder = nn.Module()
    holder.weight = weight

    def run() -> None:
        h = torch.randn(ROWS, 8) @ weight
        h.relu_().view(-1, 4).mul_(2.0)[:, :2].sigmoid_()
        h.view(2, -1).sum().backward()

    curve = trace_step(holder, None, run).curve
    assert curve.highest.activations == FLOAT * ROWS * (8 + 8 + 4 * 2 // 2) - FLOAT * ROWS * 4  # x, h; sigmoid saves h
    assert last(curve) == MemorySplit(weights=256, gradients=256)


def test_gradients_of_before_count_and_their_end_is_seen() -> None:
    model = stack()
    whole = tensor_bytes(model.parameters())
    x = torch.randn(ROWS, WIDTHS[0])
    model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        model(x).sum().backward()  # added to those that are there: the second ones are on their way
        optimizer.zero_grad()

    curve = trace_step(model, optimizer, run).curve
    assert curve.points[0].split.gradients == whole
    assert curve.highest.gradients == whole
    assert last(curve).gradients == 0
    assert max(p.split.workspace for p in curve.points if p.phase == "backward") >= FLOAT * 16 * 8


def test_an_eager_update_holds_one_gradient_at_a_time() -> None:
    """Its own hook takes the gradient away: it is seen before."""
    model, x = stack(), torch.randn(ROWS, WIDTHS[0])
    each = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        each[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    curve = trace_step(model, None, one_step(model, None, x)).curve
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert in_order(curve, "gradients") == [0, *(size for n in sizes[::-1] for size in (n, 0))]


def test_segments_save_less_and_an_eager_update_keeps_one_gradient() -> None:
    model, ids = tiny_model("llama", num_hidden_layers=4), tokens(0)
    optimizer = torch.optim.AdamW(model.parameters())
    highest = {}
    for key, options in {"plain": {}, "segments": {"segments": 4}, "eager": {"update": "eager"}}.items():
        with sbp.attach(model, [], optimizer=optimizer, **options) as engine:
            curve = trace_step(model, optimizer, _attached_step(engine, model, ids, optimizer)).curve
        highest[key] = curve.highest
        assert last(curve).gradients == 0
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

    curve = trace_step(blocks, None, run).curve
    one = FLOAT * ROWS * width
    assert max(p.split.activations for p in curve.points if p.phase == "forward") == number * one
    backward = [p.split.activations for p in curve.points if p.phase == "backward"]
    assert max(backward) == number * one + 3 * one
    assert last(curve).gradients == tensor_bytes(blocks.parameters())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks by an old name
def test_weights_of_lora_are_all_weights_and_only_the_adapters_have_gradients() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    ids, trained = tokens(0), [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)

    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    curve = trace_step(model, optimizer, run).curve
    assert last(curve).weights == tensor_bytes([*model.parameters(), *model.buffers()])
    assert last(curve).gradients == tensor_bytes(trained)
    assert last(curve).optimizer == 2 * tensor_bytes(trained) + FLOAT * len(trained)
