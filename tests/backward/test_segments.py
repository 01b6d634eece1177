"""Segments in a model: the gradients of plain autograd, with the activations of one segment at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from transformers import MixtralConfig, MixtralForCausalLM, T5Config, T5ForConditionalGeneration

import sparsebp_cli as sbp
from sparsebp_cli.backward import ModuleTrace, count_flops, saved_bytes
from sparsebp_cli.errors import SparseBPError, UnsupportedError, UsageError
from sparsebp_cli.policy import Rows, Selection, Site, Step
from tests.selector import Promises

from .conftest import FAMILIES, VOCABULARY, tokens
from .families import DECODERS, tiny_decoder
from .live_bytes import live_bytes

NUM_LAYERS = 5
ROWS = sbp.make_policy("random", keep=0.25, along="rows", weighted=True)
Gradients = dict[str, Tensor | None]


def _model(family: str = "llama", **options: Any) -> nn.Module:
    number = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return tiny_decoder(family, **{number: NUM_LAYERS}, **options)


def _loss(model: nn.Module, number: int = 0, **inputs: Any) -> Tensor:
    ids = tokens(number)
    return model(input_ids=ids, labels=ids, **inputs).loss


def _gradients(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def _assert_same(one: Gradients, other: Gradients) -> None:
    assert one.keys() == other.keys()
    for name, grad in one.items():
        assert (grad is None) == (other[name] is None), name
        assert grad is None or torch.equal(grad, other[name]), name


def _run(
    model: nn.Module, policies: Any = None, loss: Callable[[nn.Module], Tensor] = _loss, **options: Any
) -> Gradients:
    """Return the gradients of one backward; without policies and options, those of plain autograd."""
    torch.manual_seed(1)
    if policies is None and not options:
        loss(model).backward()
    else:
        with sbp.attach(model, policies or [], seed=3, **options) as engine:
            engine.backward(loss(model))
    found = _gradients(model)
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", DECODERS)
def test_gradients_and_generators_are_those_of_plain_autograd_bitwise(family: str) -> None:
    plain = _run(_model(family))
    after = torch.rand(1)
    _assert_same(_run(_model(family), segments=3), plain)
    assert torch.rand(1) == after


@pytest.mark.parametrize("segments", [1, 2, 5, ["model.layers.0", "model.layers.1", "model.layers.4"]])
def test_wherever_a_model_is_cut_its_gradients_are_the_same(segments: Any) -> None:
    _assert_same(_run(_model(), segments=segments), _run(_model()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("update", ["deferred", "eager"])
def test_weights_after_twelve_steps_are_those_of_plain_autograd_bitwise(family: str, update: str) -> None:
    """Accumulation, clipping, dropout and tied embeddings (gpt2) among them."""
    accumulation, max_norm = (2, 0.1) if update == "deferred" else (1, None)

    def train(segments: int | None) -> list[Tensor]:
        model = _model(family)
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        options = {} if segments is None else {"segments": segments, "update": update}
        engine = sbp.attach(model, [], optimizer=optimizer, **options) if segments else None
        for step in range(12):
            for number in range(accumulation):
                loss = _loss(model, accumulation * step + number)
                loss.backward() if engine is None else engine.backward(loss)
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    plain, cut = train(None), train(2)
    assert all(torch.equal(a, b) for a, b in zip(plain, cut, strict=True))


class Recurrent(nn.Module):
    """A stack that shares all its weights; every step reads another input, which is trained as well."""

    def __init__(self, length: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        cell = Cell()
        self.steps = nn.ModuleList([cell] * length)
        self.inputs = nn.ParameterList(torch.randn(4, 8) for _ in range(length))

    def forward(self, x: Tensor) -> Tensor:
        for step, extra in zip(self.steps, self.inputs, strict=True):
            x = step(x, extra=extra)
        return x.square().sum()


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x) + extra))


def _recurrent_loss(model: nn.Module) -> Tensor:
    return model(torch.linspace(-1, 1, 32).view(4, 8))


@pytest.mark.parametrize("segments", [2, 4, 6])
def test_shared_weights_are_summed_over_segments(segments: int) -> None:
    plain = _run(Recurrent(), loss=_recurrent_loss)
    cut = _run(Recurrent(), loss=_recurrent_loss, segments=segments)
    if segments == 6:  # one step each: the sum has the same order
        _assert_same(cut, plain)
    torch.testing.assert_close(cut, plain, rtol=1e-6, atol=1e-6)


def test_shared_weights_after_twelve_steps_equal_plain_autograd_to_rounding() -> None:
    models = [Recurrent(), Recurrent()]
    for model, cut in zip(models, (False, True), strict=True):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        engine = sbp.attach(model, [], optimizer=optimizer, segments=3) if cut else None
        for _ in range(12):
            loss = _recurrent_loss(model)
            loss.backward() if engine is None else engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_store_can_collect_the_gradients_of_all_segments() -> None:
    plain = _run(_model("gpt2"))
    model = _model("gpt2")
    torch.manual_seed(1)
    store = sbp.GradStore(model)
    with sbp.attach(model, [], segments=3) as engine:
        engine.backward(_loss(model), store.backward)
    assert not any(p.grad is not None for p in model.parameters())
    store.apply()
    _assert_same(_gradients(model), plain)


SEEN: list[tuple[str, int]] = []


class Watcher(Promises):
    """Notes where it is asked, keeps the first row."""

    def select(self, grad_NO: Tensor, site: Site, step: Step) -> Selection | None:
        SEEN.append((site.name, step.call))
        return Rows(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("model", [_model, Recurrent])
def test_a_policy_is_asked_once_at_each_site_in_the_order_of_the_backward(model: Any) -> None:
    loss = _loss if model is _model else _recurrent_loss
    order = []
    for options in ({}, {"segments": 3}):
        SEEN.clear()
        _run(model(), [Watcher()], loss, **options)
        order.append(list(SEEN))
    assert order[0] == order[1]
    assert len(set(SEEN)) == len(SEEN)


@pytest.mark.parametrize(
    "options",
    [
        {"sites": "linears"},
        {"sites": "linears", "engine": "reference"},
        {"sites": "branches"},
        {"sites": "branches", "checkpointing": "sparse"},
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_policies_give_the_same_gradients_with_segments(options: dict[str, Any], family: str) -> None:
    rates = {"attn_pdrop": 0.0} if family == "gpt2" else {}
    whole = _run(_model(family, **rates), [ROWS], **options)
    _assert_same(_run(_model(family, **rates), [ROWS], segments=2, **options), whole)
    dense = _run(_model(family, **rates))
    assert any(not torch.equal(whole[name], dense[name]) for name in dense)


TOGETHER: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "frozen in turn": ([sbp.make_policy("frozen", turn="layers")], {}),
    "frozen in turn, eager": ([sbp.make_policy("frozen", turn="layers")], {"update": "eager"}),
    "rows, eager": ([ROWS], {"update": "eager"}),
    "eager, clipped": ([], {"update": "eager", "max_grad_norm": 0.1, "eager_clip": "exact"}),
    "examples": ([sbp.make_policy("selective-backprop", keep=0.5)], {"num_steps": 4}),
    "feedback": ([sbp.make_policy("topk", keep=0.3, along="rows", error_feedback=True)], {}),
}


@pytest.mark.parametrize(
    ("name", "shares"),
    [*((name, False) for name in TOGETHER), *((name, True) for name in ("rows, eager", "eager, clipped", "feedback"))],
)
def test_other_choices_train_the_same_weights_with_segments(name: str, shares: bool) -> None:
    """Bitwise for gpt2; to rounding for a stack that shares all its weights, which has neither layers nor labels."""
    policies, options = TOGETHER[name]

    def train(**more: Any) -> list[Tensor]:
        model = Recurrent() if shares else _model("gpt2")
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        with sbp.attach(model, policies, optimizer=optimizer, seed=3, **options, **more) as engine:
            for step in range(4):
                engine.backward(_recurrent_loss(model) if shares else _loss(model, step))
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    tolerance = 1e-5 if shares else 0.0
    torch.testing.assert_close(train(segments=2), train(), rtol=tolerance, atol=tolerance)


def test_autocast_is_the_same_in_the_second_run() -> None:
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _loss(model)

    _assert_same(_run(_model(), loss=loss, segments=3), _run(_model(), loss=loss))

    def recurrent_loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # which keeps casts of weights, also those without a graph
            return _recurrent_loss(model)

    plain = _run(Recurrent(), loss=recurrent_loss)
    for name, grad in _run(Recurrent(), loss=recurrent_loss, segments=3).items():
        torch.testing.assert_close(grad, plain[name], rtol=2e-2, atol=2e-2)


def _adapted() -> nn.Module:
    model = get_peft_model(_model(), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
def test_adapters_are_trained_though_the_first_input_needs_no_gradient() -> None:
    torch.manual_seed(5)
    plain = _run(_adapted())
    torch.manual_seed(5)
    assert sum(grad is not None for grad in plain.values()) == NUM_LAYERS * 14
    _assert_same(_run(_adapted(), segments=2), plain)


def test_nothing_is_run_again_below_the_lowest_trained_layer() -> None:
    def half() -> nn.Module:
        model = _model()
        for name, parameter in model.named_parameters():
            frozen = ("embed", "layers.0.", "layers.1.", "layers.2.")
            parameter.requires_grad_(not any(part in name for part in frozen))
        return model

    _assert_same(_run(half(), segments=5), _run(half()))
    model = half()
    with sbp.attach(model, [], segments=5) as engine, ModuleTrace(model) as trace, count_flops(trace) as flops:
        engine.backward(_loss(model))
    assert {name.split(".")[2] for name in flops.recomputed} == {"3"}


def test_all_but_the_last_segment_is_run_again_once_and_the_backward_is_the_plain_one() -> None:
    counts = []
    for segments in (None, 3):
        model = _model()
        with sbp.attach(model, [], segments=segments) as engine, ModuleTrace(model) as trace:
            with count_flops(trace) as flops:
                engine.backward(_loss(model))
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
        loss = _loss(model)
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
        engine.backward(_loss(model))
    assert live.peak == max(held)
    assert live.now == 0


def test_a_disabled_engine_is_dense_in_the_same_segments() -> None:
    plain = _run(_model("gpt2"))
    model = _model("gpt2")
    with sbp.attach(model, [ROWS], segments=2) as engine, live_bytes(model.parameters()) as live:
        torch.manual_seed(1)
        with engine.disabled():
            loss = _loss(model)
            held = live.now
            loss.backward()
        _assert_same(_gradients(model), plain)
    with live_bytes(model.parameters()) as live:
        _loss(model)
    assert held < 0.6 * live.peak


def test_evaluation_and_generation_are_the_models_own() -> None:
    model, ids = _model(), tokens(0, batch=1, length=6)
    plain = model.eval().generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with sbp.attach(model, [], segments=3), torch.no_grad():
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), plain)
        assert model(ids, use_cache=True).past_key_values.get_seq_length() == 6


def test_two_backward_passes_through_one_forward_are_both_right() -> None:
    model = _model("gpt2")
    plain = _run(_model("gpt2"))
    torch.manual_seed(1)
    with sbp.attach(model, [], segments=3) as engine:
        loss = _loss(model)
        engine.backward(loss, lambda x: x.backward(retain_graph=True))
        _assert_same(_gradients(model), plain)
        model.zero_grad()
        engine.backward(loss)
    _assert_same(_gradients(model), plain)


@pytest.fixture
def _forget_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_forget_compiled")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("what", ["parts of layers", "model"])
def test_compiled_parts_of_layers_and_compiled_models_give_the_same_gradients(what: str) -> None:
    model, plain = _model(), _run(_model())
    for layer in model.model.layers if what != "model" else ():
        layer.mlp.compile(backend="aot_eager")
    called: Any = torch.compile(model, backend="aot_eager") if what == "model" else model
    with sbp.attach(model, [], segments=3) as engine:
        for number in (0, 1):  # compiled in the first, used in the second
            model.zero_grad()
            engine.backward(_loss(called, 0))
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-5, atol=1e-6, msg=f"{number} {name}")


def test_detaching_gives_the_model_back() -> None:
    model = _model()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with sbp.attach(model, [ROWS], segments=2) as engine:
        engine.backward(_loss(model))
        assert engine.report().notes == (
            "layers run in segments that begin with model.layers.0, model.layers.3; all but the last are run again",
        )
        with pytest.raises(UnsupportedError, match="already attached"):
            sbp.attach(model, [], segments=2)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


class Stack(nn.Module):
    """Layers with something between them that a test chooses."""

    def __init__(self, between: Callable[[list[Tensor]], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.between = between or (lambda seen: seen[-1])

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for number, layer in enumerate(self.layers):
            seen.append(layer(self.between(seen) if number in (1, 3) else seen[-1]))
        return seen[-1].square().sum()


class Skipping(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[3](self.layers[2](self.layers[0](x))).sum()


class Watching(Stack):
    def forward(self, x: Tensor) -> Tensor:
        middle = self.layers[0](x)
        return self.layers[3](self.layers[2](self.layers[1](middle))).sum() + middle.sum()


class Foreign(nn.Linear):
    """Uses a weight that it does not own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(4, 4)
        self.others = [weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.others[0]


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


def _foreign() -> nn.Module:
    model = Stack()
    model.layers[1] = Foreign(nn.Parameter(torch.ones(4)))
    return model


def _in_place() -> nn.Module:
    model = Stack()
    model.layers[0] = InPlace(4, 4)
    return model


LOST: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Stack(lambda seen: seen[-1] * 2), "between 'layers.0' and 'layers.1' something is computed"),
    (lambda: Stack(lambda seen: seen[0]), "between 'layers.0' and 'layers.1' something is computed"),
    (Skipping, "'layers.2' was run where 'layers.1' is the next layer"),
    (Watching, "the loss uses what 'layers.0' computes inside a segment"),
    (_foreign, r"a layer from 'layers.0' to 'layers.1' uses a tensor of shape \(4,\) that requires grad"),
    (_in_place, r"begins with 'layers.0' changes a tensor of shape \(2, 4\) in place"),
]


@pytest.mark.parametrize(("make", "text"), LOST)
def test_a_gradient_that_would_be_lost_is_an_error(make: Callable[[], nn.Module], text: str) -> None:
    model = make()
    exclude = [name for name, module in model.named_modules() if isinstance(module, Foreign | InPlace)]
    with sbp.attach(model, [], segments=2) as engine:
        assert exclude in ([], list(engine.report().not_covered))
        with pytest.raises(UnsupportedError, match=text):
            engine.backward(model(torch.ones(2, 4)))


def test_a_loss_of_what_a_router_inside_a_layer_computes_is_refused_and_its_scores_are_told() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        sizes = FAMILIES["llama"] | {"num_local_experts": 4, "num_hidden_layers": 3}
        return MixtralForCausalLM(MixtralConfig(**sizes)).train()

    model = make()
    scores = model(tokens(0), output_router_logits=True).router_logits
    plain = _run(model)
    _assert_same(_run(make(), segments=3), plain)
    with sbp.attach(model, [], segments=3) as engine:
        output = model(tokens(0), labels=tokens(0), output_router_logits=True)
        assert all(torch.equal(a, b) for a, b in zip(output.router_logits, scores, strict=True))
        with pytest.raises(UnsupportedError, match=r"the loss uses what 'model.layers.\d' computes inside a segment"):
            engine.backward(output.loss)


def test_an_encoder_that_all_layers_of_a_decoder_look_at_gets_its_whole_gradient() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 4, "num_heads": 4}
        return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, decoder_start_token_id=0)).train()

    plain, cut = _run(make()), _run(make(), segments=3)
    for name, grad in plain.items():  # summed over the decoder's layers in another order
        torch.testing.assert_close(cut[name], grad, rtol=1e-5, atol=1e-6, msg=name)


def test_between_segments_a_model_may_compute_and_after_a_failure_it_begins_anew() -> None:
    def between(seen: list[Tensor]) -> Tensor:
        if failing and len(seen) == 2:
            raise ValueError("once")
        return seen[-1] * 2 + seen[0] if len(seen) == 2 else seen[-1]

    failing = False
    x = torch.linspace(-1, 1, 8).view(2, 4)
    plain = _run(Stack(between), loss=lambda m: m(x))
    cut = Stack(between)
    with sbp.attach(cut, [], segments=["layers.0", "layers.1", "layers.3"]) as engine:
        failing = True
        with pytest.raises(ValueError, match="once"):
            cut(x)
        failing = False
        engine.backward(cut(x))
    _assert_same(_gradients(cut), plain)


def test_a_filled_cache_is_refused() -> None:
    model = _model()
    with torch.no_grad():
        cache = model(tokens(0), use_cache=True).past_key_values
    with (
        sbp.attach(model, [], segments=2),
        pytest.raises(UnsupportedError, match=r"'model.layers.0' is given keys and values of earlier positions"),
    ):
        _loss(model, past_key_values=cache)


def test_the_children_of_a_sequential_are_layers_and_running_statistics_move_once() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        parts = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.ReLU()) for _ in range(4))
        return nn.Sequential(*parts, nn.Linear(4, 1))

    def loss(model: nn.Module) -> Tensor:
        return model(torch.linspace(-1, 1, 32).view(8, 4).sin()).square().sum()

    plain, cut = make(), make()
    _assert_same(_run(cut, loss=loss, segments=3), _run(plain, loss=loss))
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
    _assert_same(_gradients(cut), _gradients(plain))
    for (name, one), (_, other) in zip(plain.named_buffers(), cut.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    assert (int(cut[0].count), int(cut[1].count)) == (3, 3)


REFUSED: list[tuple[dict[str, Any], type[SparseBPError], str]] = [
    ({"segments": 0}, UsageError, "segments must be 1 to 5, the number of layers, or a list of module names, got 0"),
    ({"segments": 6}, UsageError, "segments must be 1 to 5.*, got 6"),
    ({"segments": True}, UsageError, "got True"),
    ({"segments": "model.layers.0"}, UsageError, "a number of segments or a list of module names, got 'model"),
    ({"segments": []}, UsageError, r"a list of module names, got \[\]"),
    ({"segments": 2.0}, UsageError, "a list of module names, got 2.0"),
    (
        {"segments": ["model.layers.0", "model.layer.3"]},
        UsageError,
        r"no layer is called 'model.layer.3'; layers: model.layers.0 to model.layers.4; did you mean model.layers.3\?",
    ),
    ({"segments": ["model.layers.0.mlp"]}, UsageError, "no layer is called 'model.layers.0.mlp'"),
    (
        {"segments": ["model.layers.0", "model.layers.3", "model.layers.2"]},
        UsageError,
        "'model.layers.2' does not come after 'model.layers.3'",
    ),
    ({"segments": ["model.layers.1"]}, UsageError, "must begin with the first layer, 'model.layers.0', got 'model"),
    ({"segments": 2, "sites": "nodes"}, UnsupportedError, "segments hide the nodes of their layers"),
    (
        {"segments": 2, "sites": "nodes", "policies": [sbp.make_policy("max-child")]},
        UnsupportedError,
        "segments hide the nodes of their layers",
    ),
    (
        {"segments": 2, "policies": [sbp.make_policy("tokens", score="random", keep=0.5)]},
        UnsupportedError,
        "SelectedTokens with segments is not built",
    ),
]


@pytest.mark.parametrize(("options", "error", "text"), REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(options: dict[str, Any], error: type[SparseBPError], text: str) -> None:
    model = _model()
    with pytest.raises(error, match=text):
        sbp.attach(model, options.pop("policies", []), **options)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_checkpointed_layers_and_models_without_layers_are_refused() -> None:
    model = _model()
    model.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(UnsupportedError, match=r"segments and activation checkpointing \(at 'model"):
        sbp.attach(model, [], segments=2)
    with pytest.raises(UnsupportedError, match="Linear has no list of layers"):
        sbp.attach(nn.Linear(2, 2), [], segments=1)
