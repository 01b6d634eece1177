"""Models that are no decoders: attached without a gradient policy, every way of running trains as plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError

SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48, "num_labels": 3}


class Layers(nn.Module):
    """Layers one after the other, and a mean at the end."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(number) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.abs().square().mean()


class Convolved(Layers):
    """No linear anywhere; running statistics of both kinds, activations in place, dropouts of unlike shares."""

    def __init__(self) -> None:
        super().__init__(
            lambda n: nn.Sequential(
                nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1),
                nn.BatchNorm2d(8, momentum=None if n == 1 else 0.1),
                nn.ReLU(inplace=True),
                nn.Dropout2d(0.1 * n),
            )
        )


class Recurrent(Layers):
    """Layers that take and give tuples, with several weights and a dropout in one call."""

    def __init__(self) -> None:
        super().__init__(lambda _: nn.LSTM(8, 8, num_layers=2, dropout=0.3))

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return x.square().mean()


class Skipped(nn.Module):
    """As a U-Net: what each layer down gives is read by its counterpart up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.down:
            x = layer(x)
            seen.append(x)
        for layer in self.up:
            x = layer(x) + seen.pop()
        return x.square().mean()


class Complex(nn.Module):
    """Numbers with a phase, in a linear and in a weight that is used outside of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.cfloat)
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(self.linear(x.to(torch.cfloat)) * self.phase, self.linear.weight).abs())


class Empty(nn.Module):
    """Has parameters without an entry, one that no gradient arrives at, and one that only sometimes has one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.nothing, self.unused = nn.Parameter(torch.empty(0, 8)), nn.Parameter(torch.ones(3))
        # As nn.Linear(8, 0), whose initialization warns.
        self.narrow = nn.Linear(8, 1)
        self.narrow.weight, self.narrow.bias = nn.Parameter(torch.empty(0, 8)), nn.Parameter(torch.empty(0))
        self.linear, self.number = nn.Linear(8, 8), number

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.nothing.sum() + self.narrow(x).sum()
        return torch.tanh(x)


class Routed(nn.Module):
    """Experts of which each row goes to one: those without a row have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 6), nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 8)
        weight, number = self.router(rows).softmax(-1).max(-1)
        parts = [(number == n).nonzero()[:, 0] for n in range(len(self.experts))]
        result = torch.zeros_like(rows)
        for expert, index in zip(self.experts, parts, strict=True):
            if len(index):
                result = result.index_add(0, index, weight[index, None] * expert(rows[index]))
        return x + result.view_as(x)


def _normed(norm: Callable[..., nn.Module]) -> nn.Module:
    return Layers(lambda _: nn.Sequential(norm(nn.Linear(8, 8)), nn.Tanh()))


ROWS_3_8 = (3, 8)
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "convolutions": (Convolved, (2, 3, 6, 6)),
    "lstm": (Recurrent, (5, 2, 8)),
    "unet": (Skipped, ROWS_3_8),
    "experts": (lambda: Layers(lambda _: Routed()), ROWS_3_8),
    "complex": (lambda: Layers(lambda _: Complex()), ROWS_3_8),
    "double": (lambda: Layers(lambda _: nn.Linear(8, 8)).double(), ROWS_3_8),
    "bfloat16": (lambda: Layers(lambda _: nn.Linear(8, 8)).bfloat16(), ROWS_3_8),
    "empty": (lambda: Layers(Empty), ROWS_3_8),
    "spectral-norm": (lambda: _normed(spectral_norm), ROWS_3_8),
    "spectral-norm-hook": (lambda: _normed(nn.utils.spectral_norm), ROWS_3_8),
    "weight-norm": (lambda: _normed(weight_norm), ROWS_3_8),
    "orthogonal": (lambda: _normed(orthogonal), ROWS_3_8),
    "vit": (
        lambda: ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, hidden_dropout_prob=0.2, **SMALL)),
        {"pixel_values": (2, 3, 8, 8), "labels": 3},
    ),
    "bert": (lambda: BertForSequenceClassification(BertConfig(vocab_size=40, **SMALL)), {"input_ids": 40, "labels": 3}),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(
                vocab_size=40,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=4,
                num_decoder_layers=4,
                num_heads=4,
                decoder_start_token_id=0,
            )
        ),
        {"input_ids": 40, "labels": -40},
    ),
}


def _draw(shape: Any, generator: torch.Generator) -> Tensor:
    """Numbers of a shape; or two examples of words below a number, or (below 0) more words, or two labels."""
    if isinstance(shape, tuple):
        return torch.randn(shape, generator=generator)
    return torch.randint(1, abs(shape), (2,) if shape == 3 else (2, 7), generator=generator)


def _train(name: str, options: dict[str, Any] | None, policies: Any = ()) -> dict[str, Tensor]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    engine = None if options is None else sbp.attach(model, list(policies), optimizer=optimizer, **options)
    torch.manual_seed(1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        if isinstance(shape, tuple):
            loss = model(_draw(shape, generator).to(next(model.parameters()).dtype.to_real()))
        else:
            loss = model(**{key: _draw(each, generator) for key, each in shape.items()}).loss
        if engine is None:
            loss.backward()
        else:
            engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.detach()
    return {key: value.clone() for key, value in model.state_dict().items()} | {"drawn": torch.rand(())}


WAYS: dict[str, dict[str, Any]] = {
    "attached": {},
    "eager": {"update": "eager"},
    "segments": {"segments": 2},
    "segment-each-eager": {"segments": 3, "update": "eager"},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_way_of_running_trains_as_plain_pytorch(name: str) -> None:
    plain = _train(name, None)
    # A tensor that several segments read gets its gradient in another order of sums: T5's biases and states, an LSTM's.
    tolerance = 1e-6 if name in ("t5", "lstm") else 0.0
    for way, options in WAYS.items():
        if name == "unet" and way == "segments":
            continue  # see the next test
        found = _train(name, options)
        assert found.keys() == plain.keys()
        for key, value in plain.items():
            allowed = tolerance if "segments" in options else 0.0
            torch.testing.assert_close(found[key], value, rtol=0.0, atol=allowed, msg=f"{way}: {key}")


def test_a_skip_out_of_the_middle_of_a_segment_is_refused_before_a_gradient_is_lost() -> None:
    with pytest.raises(UnsupportedError, match=r"the loss uses a tensor that 'down.0' computes inside a segment"):
        _train("unet", {"segments": 2})


@pytest.mark.parametrize("name", ["spectral-norm", "weight-norm", "orthogonal", "complex", "empty"])
def test_linears_that_compute_in_their_own_way_stay_dense_and_are_named(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MODELS[name][0](), nn.Linear(1, 1))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with sbp.attach(model, [sbp.make_policy("topk", keep=0.5, along="rows")]) as engine:
        names = engine.report().not_covered
    assert any(each.startswith("0.layers.3") for each in names)
    assert "1" not in names
    for key, value in before.items():  # a norm's estimate moves whenever its weight is read
        assert torch.equal(model.state_dict()[key], value), key


def test_a_policy_that_is_asked_at_linears_needs_one() -> None:
    with pytest.raises(UsageError, match="Convolved has no linear layer that a policy can use"):
        sbp.attach(Convolved(), [sbp.make_policy("topk", keep=0.5, along="rows")])


def test_parameters_of_a_model_without_a_linear_can_be_frozen() -> None:
    model = Convolved()
    with sbp.attach(model, [sbp.make_policy("frozen", train=["layers.2", "layers.3"])]) as engine:
        engine.backward(model(torch.randn(2, 3, 6, 6)))
        has_gradient = {name.split(".")[1] for name, p in model.named_parameters() if p.grad is not None}
    assert has_gradient == {"2", "3"}


@pytest.mark.parametrize("options", [{}, {"segments": 2}, {"policies": [sbp.make_policy("frozen", freeze=["0"])]}])
def test_a_model_whose_parameters_have_no_shape_yet_is_refused(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3))
    with pytest.raises(UsageError, match=r"'0.weight' is lazy and has no shape yet: run the model once"):
        sbp.attach(model, options.pop("policies", []), **options)


def test_a_model_without_a_linear_is_not_updated_by_two_engines() -> None:
    model = Convolved()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        sbp.attach(model, [], optimizer=optimizer, update="eager"),
        pytest.raises(UnsupportedError, match=r"first detach the other engine, which updates 0.0.weight"),
    ):
        sbp.attach(model.layers, [], optimizer=optimizer, update="eager")
    sbp.attach(model, [], optimizer=optimizer, update="eager").detach()
