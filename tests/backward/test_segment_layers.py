"""Segments of layers as people write them: with generators of their own, lists that are filled, objects, modes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError

from .segment_case import Gradients, assert_same, gradients_of


class Stack(nn.Module):
    """Four layers, each given what the one before gave; and what all of them are given, if anything."""

    def __init__(self, make: Callable[[], nn.Module], shared: Callable[[], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(make() for _ in range(4)), nn.Linear(4, 1)
        self.shared = shared

    def forward(self, x: Any) -> Tensor:
        also = () if self.shared is None else (self.shared(),)
        for layer in self.layers:
            x = layer(x, *also)
        return self.head(x if isinstance(x, Tensor) else x["x"]).square().sum()


class Dropped(nn.Module):
    """Takes one of two ways, by a generator that is not PyTorch's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.one, self.other, self.draw = nn.Linear(4, 4), nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        share = self.draw()
        return x + share * torch.tanh((self.one if share < 0.5 else self.other)(x))


class Noisy(nn.Module):
    """A dropout, and a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Filling(nn.Linear):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(torch.tanh(super().forward(x)))
        return seen[-1]


class Entering(nn.Linear):
    """Writes into the dict that it is given, and returns it."""

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        x["x"] = torch.tanh(super().forward(x["x"]))
        return x


@dataclass
class Box:
    x: Tensor = field(default_factory=lambda: torch.zeros(3, 4))


class Boxed(nn.Linear):
    def forward(self, x: Tensor, box: Box) -> Tensor:
        box.x = box.x + torch.tanh(super().forward(x))
        return x + box.x


class Boxing(nn.Linear):
    def forward(self, x: Tensor | Box) -> Box:
        return Box(torch.tanh(super().forward(x.x if isinstance(x, Box) else x)))


class Counting(nn.Linear):
    """Keeps a number, and tensors that are no buffers or were none at first."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.count, self.mean, self.total = 0, torch.zeros(4), torch.zeros(())
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.total += self.mean.sum()
        self.first = x.detach()[0] if self.first is None else 0.5 * self.first
        return torch.tanh(super().forward(x - self.mean - self.first)) * self.count + self.total


class Drawing(nn.Linear):
    """Has a generator of its own."""

    def __init__(self, generator: Any, draw: Callable[[Any], float]) -> None:
        super().__init__(4, 4)
        self.generator, self.draw = generator, draw

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) * self.draw(self.generator)


class Judged(nn.Linear):
    """Keeps a loss of its own, as routers of experts do."""

    def __init__(self, *, in_list: bool = False) -> None:
        super().__init__(4, 4)
        self.in_list, self.aside = in_list, []

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.in_list:
            self.aside.append(x.square().mean())
        else:
            self.aside = [x.square().mean()]
        return x


def given() -> Tensor:
    return torch.linspace(-1.0, 1.0, 12).view(3, 4)


def differentiate(
    model: nn.Module, x: Any = None, between: Callable[[], None] | None = None, **options: Any
) -> tuple[Gradients, list[float]]:
    """Return the gradients, and what generators and statistics give next."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with sbp.attach(model, [], **options) as engine:
        loss = model(given() if x is None else x)
        if between is not None:
            between()
        engine.backward(loss)
    left = [random.random(), np.random.rand(), float(torch.rand(())), *(float(b.sum()) for b in model.buffers())]
    found = gradients_of(model)
    model.zero_grad()
    return found, left


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_layers_that_python_or_numpy_drops_are_dropped_alike_in_the_second_run(draw: Callable[[], float]) -> None:
    (plain, left), (found, after) = (
        differentiate(Stack(lambda: Dropped(draw)), **options) for options in ({}, {"segments": 2})
    )
    assert_same(found, plain)
    assert after == left
    torch.manual_seed(0)
    layers = nn.Sequential(*(Dropped(draw) for _ in range(4)))
    stores = []
    for number in (1, 4):
        random.seed(1)
        np.random.seed(1)
        _, store = sbp.segmented_backward(layers, given(), lambda y: y.square().sum(), num_segments=number)
        stores.append(dict(store.items()))
    assert stores[0].keys() == stores[1].keys()
    for key, grad in stores[0].items():
        assert torch.equal(stores[1][key], grad)


def test_a_model_in_evaluation_at_its_backward_is_run_again_as_it_was_trained() -> None:
    results = []
    for options in ({}, {"segments": 2}, {"segments": 4}):
        model = Stack(Noisy)
        results.append(differentiate(model, between=model.eval, **options))
        assert not any(module.training for module in model.modules())
    for found, left in results[1:]:
        assert_same(found, results[0][0])
        assert left == results[0][1]


def test_weights_that_change_before_the_backward_are_refused_as_by_autograd() -> None:
    model = Stack(lambda: nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    with sbp.attach(model, [], optimizer=optimizer, segments=2) as engine:
        first, second = model(given()), model(2.0 * given())
        engine.backward(first)
        optimizer.step()
        with pytest.raises(UsageError, match=r"a weight of shape \(4, 4\) .* 'layers.0' changed after"):
            engine.backward(second)


@pytest.mark.parametrize("segments", [2, 4])
def test_a_dict_that_a_layer_changes_and_returns_goes_on(segments: int) -> None:
    plain, found = (
        differentiate(Stack(lambda: Entering(4, 4)), {"x": given()}, **options)[0]
        for options in ({}, {"segments": segments})
    )
    assert_same(found, plain)


@pytest.mark.parametrize("segments", [2, 4])
@pytest.mark.parametrize(
    ("make", "shared", "message"),
    [
        (Filling, list, "'layers.0' changes its argument, a list, but does not return it"),
        (Boxed, Box, "'layers.0' changes its argument, a Box, but does not return it"),
        (Boxing, None, "'layers.0' returns a tensor inside a Box, where segments cannot see its gradient"),
    ],
)
def test_what_a_layer_hides_in_lists_and_objects_is_refused_in_the_forward(
    make: Callable[..., nn.Module], shared: Callable[[], Any] | None, message: str, segments: int
) -> None:
    model = Stack(lambda: make(4, 4), shared)
    with sbp.attach(model, [], segments=segments), pytest.raises(UnsupportedError, match=message):
        model(given())
    if shared is not None:
        model(given()).backward()  # as it was


def test_a_gradient_that_is_given_inside_of_an_object_is_refused() -> None:
    class Reading(nn.Linear):
        def forward(self, x: Tensor, box: Box) -> Tensor:
            return super().forward(x) + box.x

    box = Box(given().requires_grad_())
    model = Stack(lambda: Reading(4, 4), lambda: box)
    with (
        sbp.attach(model, [], segments=2),
        pytest.raises(UnsupportedError, match=r"'layers.0' is given a tensor inside a Box"),
    ):
        model(given())


def test_a_segment_may_fill_a_list_and_hand_it_on_but_not_an_object() -> None:
    class Growing(nn.Linear):
        def forward(self, seen: list[Tensor]) -> list[Tensor]:
            seen.append(torch.tanh(super().forward(seen[-1])))
            return seen

    torch.manual_seed(0)
    layers = nn.Sequential(*(Growing(4, 4) for _ in range(4)))

    def loss_of(seen: list[Tensor]) -> Tensor:
        assert len(seen) == 5
        return torch.stack(seen).square().sum()

    loss_of(layers([given()])).backward()
    _, store = sbp.segmented_backward(layers, [given()], loss_of, num_segments=2)
    for name, parameter in layers.named_parameters():
        torch.testing.assert_close(store[parameter], parameter.grad, msg=name)
    with pytest.raises(UnsupportedError, match="segment 0 returns a tensor inside a Box"):
        sbp.segmented_backward([Boxing(4, 4), Boxing(4, 4)], given(), lambda box: box.x.sum())


def test_layers_that_are_skipped_at_random_are_refused_before_anything_starts() -> None:
    model = Stack(lambda: nn.Linear(4, 4))
    model.layerdrop = 0.1
    with pytest.raises(UnsupportedError, match=r"Stack skips layers at random \(layerdrop=0.1\): set layerdrop to 0"):
        sbp.attach(model, [], segments=2)
    model.layerdrop = 0.0
    sbp.attach(model, [], segments=2).detach()


@pytest.mark.parametrize("segments", [2, 4])
def test_what_modules_count_and_keep_moves_once_a_step(segments: int) -> None:
    kept = []
    for options in ({}, {"segments": segments}):
        model = Stack(Counting)
        for _ in range(3):
            found, _ = differentiate(model, **options)
        keeps = [(layer.count, layer.mean, layer.total, layer.first) for layer in model.layers]
        kept.append((found, keeps))
    assert_same(kept[1][0], kept[0][0])
    for plain, other in zip(kept[0][1], kept[1][1], strict=True):
        assert plain[0] == other[0] == 3
        for one, two in zip(plain[1:], other[1:], strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda g: float(torch.rand((), generator=g))),
        (lambda: random.Random(1), lambda g: g.random()),
        (lambda: np.random.default_rng(1), lambda g: g.random()),
        (lambda: np.random.RandomState(1), lambda g: g.rand()),
    ],
    ids=["torch", "python", "numpy", "numpy-old"],
)
def test_generators_of_modules_are_drawn_from_once(make: Callable[[], Any], draw: Callable[[Any], float]) -> None:
    results = []
    for options in ({}, {"segments": 2}):
        model = Stack(lambda: Drawing(make(), draw))
        differentiate(model, **options)
        found, _ = differentiate(model, **options)
        results.append((found, [draw(layer.generator) for layer in model.layers]))
    assert_same(results[1][0], results[0][0])
    assert results[1][1] == results[0][1]


@pytest.mark.parametrize("in_list", [False, True])
def test_a_loss_that_a_layer_keeps_counts_in_the_last_segment_alone(in_list: bool) -> None:
    model = Stack(lambda: Judged(in_list=in_list))
    (model(given()) + model.layers[3].aside[-1]).backward()
    plain = gradients_of(model)
    model.zero_grad()
    with sbp.attach(model, [], segments=2) as engine:
        loss = model(given())
        engine.backward(loss + model.layers[3].aside[-1])
        assert_same(gradients_of(model), plain)
        loss = model(given())
        with pytest.raises(UnsupportedError, match=r"the loss uses a tensor that 'layers.1' computes inside a segment"):
            engine.backward(loss + sum(layer.aside[-1] for layer in model.layers))
    with pytest.raises(UnsupportedError, match=r"the loss uses a tensor that 'segment 0' computes inside a segment"):
        sbp.segmented_backward(model.layers, given(), lambda y: y.sum() + model.layers[0].aside[-1])
