"""What cannot be cut into segments is refused by name, and no gradient is lost without a word."""

from __future__ import annotations

import io
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.errors import SparseBPError, UnsupportedError, UsageError
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations

from .conftest import FAMILIES, filled_cache, tokens
from .segment_case import assert_same, gradients_of, loss_of, make_model, run


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
    (lambda: Stack(lambda seen: seen[-1] * 2), "computes a tensor between the layers 'layers.0' and 'layers.1'"),
    (lambda: Stack(lambda seen: seen[0]), "computes a tensor between the layers 'layers.0' and 'layers.1'"),
    (Skipping, "layer 'layers.2' ran where 'layers.1' was expected"),
    (Watching, "the loss uses a tensor that 'layers.0' computes inside a segment"),
    (_foreign, r"a layer of 'layers.0' to 'layers.1' uses a tensor of shape \(4,\) that requires grad"),
    (_in_place, r"begins with 'layers.0' must not change an input of shape \(2, 4\) in place"),
]


@pytest.mark.parametrize(("make", "text"), LOST)
def test_a_gradient_that_would_be_lost_is_an_error(make: Callable[[], nn.Module], text: str) -> None:
    model = make()
    exclude = [name for name, module in model.named_modules() if isinstance(module, Foreign | InPlace)]
    with sbp.attach(model, [], segments=2) as engine:
        assert exclude in ([], list(engine.report().not_covered))
        with pytest.raises(UnsupportedError, match=text):
            engine.backward(model(torch.ones(2, 4)))


def test_a_loss_of_a_router_inside_a_layer_is_refused_and_its_scores_are_told() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        sizes = FAMILIES["llama"] | {"num_local_experts": 4, "num_hidden_layers": 3}
        return MixtralForCausalLM(MixtralConfig(**sizes)).train()

    model = make()
    scores = model(tokens(0), output_router_logits=True).router_logits
    plain = run(model)
    assert_same(run(make(), segments=3), plain)
    with sbp.attach(model, [], segments=3) as engine:
        output = model(tokens(0), labels=tokens(0), output_router_logits=True)
        assert all(torch.equal(a, b) for a, b in zip(output.router_logits, scores, strict=True))
        with pytest.raises(UnsupportedError, match=r"a tensor that 'model.layers.\d' computes inside a segment"):
            engine.backward(output.loss)


def test_between_segments_a_model_may_compute_and_after_a_failure_it_begins_anew() -> None:
    def between(seen: list[Tensor]) -> Tensor:
        if failing and len(seen) == 2:
            raise ValueError("once")
        return seen[-1].mul_(2) + seen[0] if len(seen) == 2 else seen[-1]

    failing = False
    x = torch.linspace(-1, 1, 8).view(2, 4)
    plain = run(Stack(between), loss=lambda m: m(x))
    cut = Stack(between)
    with sbp.attach(cut, [], segments=["layers.0", "layers.1", "layers.3"]) as engine:
        failing = True
        with pytest.raises(ValueError, match="once"):
            cut(x)
        failing = False
        engine.backward(cut(x))
    assert_same(gradients_of(cut), plain)


def test_a_filled_cache_is_refused() -> None:
    model = make_model()
    cache = filled_cache(model, tokens(0))
    with (
        sbp.attach(model, [], segments=2),
        pytest.raises(UnsupportedError, match=r"'model.layers.0' got a key.value cache with earlier positions"),
    ):
        loss_of(model, **cache)


REFUSED: list[tuple[dict[str, Any], type[SparseBPError], str]] = [
    ({"segments": 0}, UsageError, "segments: must be at least 1 or a list, got 0"),
    ({"segments": 6}, UsageError, "segments must be a number from 1 to 5.*, got 6"),
    ({"segments": True}, UsageError, "must be a whole number or a list, got true"),
    ({"segments": "model.layers.0"}, UsageError, "must be a whole number or a list, got 'model"),
    ({"segments": []}, UsageError, "must be a whole number or at least 1 item long, got a list"),
    ({"segments": 2.0}, UsageError, "must be a whole number or a list, got 2.0"),
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
    ({"segments": 2, "sites": "nodes"}, UnsupportedError, "segments=.* hides the nodes of its layers"),
    (
        {"segments": 2, "sites": "nodes", "policies": [sbp.make_policy("max-child")]},
        UnsupportedError,
        "segments=.* hides the nodes of its layers",
    ),
    (
        {"segments": 2, "policies": [sbp.make_policy("tokens", score="random", keep=0.5)]},
        UnsupportedError,
        "SelectedTokens with segments=2 is not supported",
    ),
]


@pytest.mark.parametrize(("options", "error", "text"), REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(options: dict[str, Any], error: type[SparseBPError], text: str) -> None:
    model = make_model()
    with pytest.raises(error, match=text):
        sbp.attach(model, options.pop("policies", []), **options)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_checkpointed_layers_and_models_without_layers_are_refused() -> None:
    model = make_model()
    checkpoint_activations(model)
    with pytest.raises(UnsupportedError, match=r"segments do not support activation checkpointing \(at 'model"):
        sbp.attach(model, [], segments=2)
    with pytest.raises(UnsupportedError, match="Linear has no list of layers"):
        sbp.attach(nn.Linear(2, 2), [], segments=1)


class Sharing(nn.Linear):
    """Writes its output into an object, or reads what the first layer wrote there."""

    def forward(self, x: Tensor, shared: Any) -> Tensor:
        value = super().forward(x)
        if isinstance(shared, UserDict):
            shared.setdefault("states", (value,))
            return x + value * shared["states"][0]
        shared.states = getattr(shared, "states", [value])
        return x + value * shared.states[0]


class Shared(nn.Module):
    def __init__(self, make: Callable[[], object]) -> None:
        super().__init__()
        self.layers, self.make = nn.ModuleList(Sharing(4, 4) for _ in range(4)), make

    def forward(self, x: Tensor) -> Tensor:
        shared = self.make()
        for layer in self.layers:
            x = layer(x, shared)
        return x.square().sum()


@pytest.mark.parametrize("make", [UserDict, SimpleNamespace])
def test_states_that_layers_share_in_an_object_are_refused(make: Callable[[], object]) -> None:
    shared = Shared(make)
    with (
        sbp.attach(shared, [], segments=2) as engine,
        pytest.raises(UnsupportedError, match=f"changes its argument, a {make.__name__}"),
    ):
        engine.backward(shared(torch.ones(2, 4)))


class Keeping(nn.Linear):
    """Keeps its output in an object of its own, which another layer may read."""

    def forward(self, x: Tensor) -> Tensor:
        value = super().forward(x)
        self.kept = SimpleNamespace(states=(value,))
        return value


class Reading(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum() + self.layers[0].kept.states[0].sum()


def test_a_state_that_a_layer_keeps_in_an_object_is_refused_when_the_loss_uses_it() -> None:
    model = Reading()
    model.layers[0] = Keeping(4, 4)
    with (
        sbp.attach(model, [], segments=2) as engine,
        pytest.raises(UnsupportedError, match="the loss uses a tensor that"),
    ):
        engine.backward(model(torch.ones(2, 4)))


def test_a_foreign_parameter_that_is_trained_later_is_refused_as_at_the_start() -> None:
    gate = nn.Parameter(torch.ones(4), requires_grad=False)
    model = Stack()
    model.layers[1], model.gate = Foreign(gate), gate
    with sbp.attach(model, [], segments=2) as engine:
        engine.backward(model(torch.ones(2, 4)))
        gate.requires_grad_(True)
        with pytest.raises(UnsupportedError, match="that requires grad and is neither a parameter nor an argument"):
            engine.backward(model(torch.ones(2, 4)))


def test_a_model_in_segments_is_not_pickled() -> None:
    model = Stack()
    with (
        sbp.attach(model, [], segments=2),
        pytest.raises(UnsupportedError, match="cannot be copied or pickled"),
    ):
        torch.save(model, io.BytesIO())
