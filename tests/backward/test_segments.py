"""Segments in a model: the gradients of plain autograd, with the activations of one segment at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from transformers import T5Config, T5ForConditionalGeneration

import sparsebp_cli as sbp
from benchmarks.live_bytes import live_bytes
from sparsebp_cli.backward import ModuleTrace, count_flops, saved_bytes
from sparsebp_cli.errors import UnsupportedError

from .conftest import VOCABULARY
from .families import DECODERS, tiny_decoder
from .segment_case import ROWS, Recurrent, assert_same, gradients_of, loss_of, make_model, recurrent_loss, run


@pytest.mark.parametrize("family", DECODERS)
def test_gradients_and_generators_are_those_of_plain_autograd_bitwise(family: str) -> None:
    plain = run(make_model(family))
    after = torch.rand(1)
    assert_same(run(make_model(family), segments=3), plain)
    assert torch.rand(1) == after


@pytest.mark.parametrize("segments", [1, 2, 5, ["model.layers.0", "model.layers.1", "model.layers.4"]])
def test_wherever_a_model_is_cut_its_gradients_are_the_same(segments: Any) -> None:
    assert_same(run(make_model(), segments=segments), run(make_model()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("update", ["deferred", "eager"])
def test_weights_after_twelve_steps_are_those_of_plain_autograd_bitwise(family: str, update: str) -> None:
    """Accumulation, clipping, dropout and tied embeddings (gpt2) among them."""
    accumulation, max_norm = (2, 0.1) if update == "deferred" else (1, None)

    def train(segments: int | None) -> list[Tensor]:
        model = make_model(family)
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        options = {} if segments is None else {"segments": segments, "update": update}
        engine = sbp.attach(model, [], optimizer=optimizer, **options) if segments else None
        for step in range(12):
            for number in range(accumulation):
                loss = loss_of(model, accumulation * step + number)
                loss.backward() if engine is None else engine.backward(loss)
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain, cut = train(None), train(2)
    assert all(torch.equal(a, b) for a, b in zip(plain, cut, strict=True))


@pytest.mark.parametrize("segments", [2, 4, 6])
def test_shared_weights_are_summed_over_segments(segments: int) -> None:
    plain = run(Recurrent(), loss=recurrent_loss)
    cut = run(Recurrent(), loss=recurrent_loss, segments=segments)
    if segments == 6:  # one step each: the sum has the same order
        assert_same(cut, plain)
    torch.testing.assert_close(cut, plain, rtol=1e-6, atol=1e-6)


def test_shared_weights_after_twelve_steps_equal_plain_autograd_to_rounding() -> None:
    models = [Recurrent(), Recurrent()]
    for model, cut in zip(models, (False, True), strict=True):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        engine = sbp.attach(model, [], optimizer=optimizer, segments=3) if cut else None
        for _ in range(12):
            loss = recurrent_loss(model)
            loss.backward() if engine is None else engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_store_can_collect_the_gradients_of_all_segments() -> None:
    plain = run(make_model("gpt2"))
    model = make_model("gpt2")
    torch.manual_seed(1)
    store = sbp.GradStore(model)
    with sbp.attach(model, [], segments=3) as engine:
        engine.backward(loss_of(model), store.backward)
    assert not any(p.grad is not None for p in model.parameters())
    store.apply()
    assert_same(gradients_of(model), plain)


def test_an_encoder_that_all_layers_of_a_decoder_look_at_gets_its_whole_gradient() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 4, "num_heads": 4}
        return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0)).train()

    plain, cut = run(make()), run(make(), segments=3)
    for name, grad in plain.items():  # summed over the decoder's layers in another order
        torch.testing.assert_close(cut[name], grad, rtol=1e-5, atol=1e-6, msg=name)


def test_the_children_of_a_sequential_are_layers_and_running_statistics_move_once() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        parts = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.ReLU()) for _ in range(4))
        return nn.Sequential(*parts, nn.Linear(4, 1))

    def loss(model: nn.Module) -> Tensor:
        return model(torch.linspace(-1, 1, 32).view(8, 4).sin()).square().sum()

    plain, cut = make(), make()
    assert_same(run(cut, loss=loss, segments=3), run(plain, loss=loss))
    for (name, one), (_, other) in zip(plain.named_buffers(), cut.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    assert cut[0][1].num_batches_tracked == 1


class Counting(nn.Linear):
    """Multiplies by how often it ran, which it counts in place or by another tensor."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__(4, 4)
        self.in_place = in_place
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.count += 1
        else:
            self.count = self.count + 1
        return super().forward(x) * self.count


def test_a_layer_that_reads_what_it_has_counted_reads_the_same_when_it_runs_again() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        own = [Counting(in_place=True), Counting(in_place=False)]
        return nn.Sequential(*own, spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 1))

    plain, cut = make(), make()
    x = torch.linspace(-1, 1, 32).view(8, 4).sin()
    for model, segments in ((plain, None), (cut, 4)):
        with sbp.attach(model, [], segments=segments) as engine:
            for _ in range(3):
                engine.backward(model(x).square().sum())
    assert_same(gradients_of(cut), gradients_of(plain))
    for (name, one), (_, other) in zip(plain.named_buffers(), cut.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    assert (int(cut[0].count), int(cut[1].count)) == (3, 3)


def test_nothing_is_run_again_below_the_lowest_trained_layer() -> None:
    def half() -> nn.Module:
        model = make_model()
        for name, parameter in model.named_parameters():
            frozen = ("embed", "layers.0.", "layers.1.", "layers.2.")
            parameter.requires_grad_(not any(part in name for part in frozen))
        return model

    assert_same(run(half(), segments=5), run(half()))
    model = half()
    with sbp.attach(model, [], segments=5) as engine, ModuleTrace(model) as trace, count_flops(trace) as flops:
        engine.backward(loss_of(model))
    assert {name.split(".")[2] for name in flops.recomputed} == {"3"}


def test_all_but_the_last_segment_is_run_again_once_with_the_plain_backward() -> None:
    counts = []
    for segments in (None, 3):
        model = make_model()
        with sbp.attach(model, [], segments=segments) as engine, ModuleTrace(model) as trace:
            with count_flops(trace) as flops:
                engine.backward(loss_of(model))
            counts.append(flops)
    plain, cut = counts
    assert cut.forward == plain.forward
    assert cut.backward == plain.backward
    again = {
        name: n for name, n in plain.forward.items() if name.startswith(tuple(f"model.layers.{i}." for i in range(4)))
    }
    assert dict(cut.recomputed) == again
    assert not plain.recomputed


@pytest.mark.parametrize("segments", [1, 2, 4, 8, ["model.layers.0", "model.layers.6"]])
def test_the_peak_of_saved_bytes_is_what_theory_says(segments: Any) -> None:
    """Inputs of the segments, and the activations of one, as told layer by layer in a plain run."""
    length = 8
    model = tiny_decoder("llama", num_hidden_layers=length)
    with ModuleTrace(model) as trace, saved_bytes(model.parameters(), trace) as saved:
        loss = loss_of(model)
    layers = [sum(n for name, n in saved.by_module.items() if f"layers.{i}." in f"{name}.") for i in range(length)]
    outside, embedding = saved.total - sum(layers), saved.by_module["model.embed_tokens"]
    del loss
    stream, positions = 2 * 16 * 32 * 4, 16 * 8
    rotary = layers[0] - layers[1]  # cosines and sines, which the first layer saves for all of them
    starts = [int(name.split(".")[2]) for name in segments] if isinstance(segments, list) else []
    starts = starts or [number * length // segments for number in range(segments)]
    ends = [*starts[1:], length]
    held = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        inputs = stream * number + (rotary + positions if len(starts) > 1 else rotary)
        held.append(inputs + sum(layers[start:end]) - (rotary if start == 0 else 0))
    held = [number + embedding for number in held]
    held[-1] += outside - embedding  # the head and the loss go with the last segment
    with sbp.attach(model, [], segments=segments) as engine, live_bytes(model.parameters()) as live:
        engine.backward(loss_of(model))
    assert live.peak == max(held)
    assert live.now == 0


def test_two_backward_passes_through_one_forward_are_both_right() -> None:
    model = make_model("gpt2")
    plain = run(make_model("gpt2"))
    torch.manual_seed(1)
    with sbp.attach(model, [], segments=3) as engine:
        loss = loss_of(model)
        engine.backward(loss, lambda x: x.backward(retain_graph=True))
        assert_same(gradients_of(model), plain)
        model.zero_grad()
        engine.backward(loss)
    assert_same(gradients_of(model), plain)


def test_detaching_gives_the_model_back() -> None:
    model = make_model()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with sbp.attach(model, [ROWS], segments=2) as engine:
        engine.backward(loss_of(model))
        assert engine.report().notes == (
            "the segments begin with model.layers.0, model.layers.3; the backward recomputes all except the last",
        )
        with pytest.raises(UnsupportedError, match="already attached"):
            sbp.attach(model, [], segments=2)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("segments", [2, 3])
def test_a_parameters_own_hook_runs_once(segments: int) -> None:
    def gradients(**options: Any) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        calls = []

        def double(gradient: Tensor) -> Tensor:
            calls.append(1)
            return gradient * 2.0

        for parameter in model.parameters():
            parameter.register_hook(double)
        with sbp.attach(model, [], **options) as engine:
            engine.backward(model(torch.ones(2, 4)).square().sum())
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], len(calls)

    (plain, count), (found, same) = gradients(), gradients(segments=segments)
    assert count == same == 8
    assert all(torch.allclose(one, other) for one, other in zip(plain, found, strict=True))
