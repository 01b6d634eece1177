"""Segmented backward of a list of modules: plain gradients in one store, one segment's activations at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from benchmarks.live_bytes import live_bytes
from sparsebp_cli.errors import SparseBPError, UnsupportedError, UsageError


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh()) for _ in range(6))
    return nn.Sequential(*parts, nn.Linear(8, 2))


def _batch(*, requires_grad: bool = False) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_(requires_grad)


def _loss(y: Tensor) -> Tensor:
    return y.square().mean()


def _assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    for (name, a), (_, b) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("num_segments", [None, 1, 2, 3, 7])
def test_gradients_statistics_and_generators_are_those_of_plain_autograd_bitwise(num_segments: int | None) -> None:
    plain, cut, x = _network(), _network(), _batch()
    torch.manual_seed(1)
    expected = _loss(plain(x))
    expected.backward()
    after = torch.rand(1)
    torch.manual_seed(1)
    loss, store = sbp.segmented_backward(cut, x, _loss, num_segments=num_segments)
    assert torch.rand(1) == after
    assert (loss, loss.requires_grad) == (expected, False)
    assert {id(key) for key in store} == {id(p) for p in cut.parameters()}
    store.apply()
    _assert_same(plain, cut)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_an_rnn_that_shares_all_its_weights_steps_once_with_the_sum(name: str) -> None:
    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2)

    (cell, head), (plain_cell, plain_head), x = make(), make(), _batch()
    optimizers = [
        getattr(torch.optim, name)([*c.parameters(), *h.parameters()], lr=0.01)
        for c, h in ((cell, head), (plain_cell, plain_head))
    ]
    for _ in range(12):
        _, store = sbp.segmented_backward([*[cell] * 9, head], x, _loss, num_segments=4)
        assert len(store) == 4
        store.apply()
        value = x
        for _ in range(9):
            value = plain_cell(value)
        _loss(plain_head(value)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for part, plain in ((cell, plain_cell), (head, plain_head)):
        for a, b in zip(part.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_the_input_is_taken_out_of_the_store() -> None:
    network, x, plain_x = _network().eval(), _batch(requires_grad=True), _batch(requires_grad=True)
    _loss(network(plain_x)).backward()
    _, store = sbp.segmented_backward(network, x, _loss, num_segments=3)
    assert torch.equal(store.pop(x), plain_x.grad)
    assert x.grad is None


class Fork(nn.Module):
    """From a tensor to a dict of two and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"left": self.left(x), "both": (self.right(x), x > 0), "unused": x * 2}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)

    def forward(self, parts: dict[str, Any]) -> tuple[Tensor, Tensor]:
        right, mask = parts["both"]
        return self.last(parts["left"]) * mask, right


def test_tuples_and_dicts_go_from_segment_to_segment() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), Fork(), Join())

    def loss(pair: tuple[Tensor, Tensor]) -> Tensor:
        return (pair[0] - pair[1]).square().sum()

    plain, cut, x = make(), make(), _batch()
    loss(plain(x)).backward()
    sbp.segmented_backward(cut, x, loss)[1].apply()
    _assert_same(plain, cut)


def test_functions_may_be_segments_and_the_loss_may_be_trained() -> None:
    weight, scale = nn.Parameter(torch.eye(8)), nn.Parameter(torch.ones(2))
    network = _network().eval()

    def loss(y: Tensor) -> Tensor:
        return (y * scale).square().sum()

    parts = [lambda x: torch.tanh(x @ weight), [network[0], network[1]], network[2:]]
    loss(network(torch.tanh(_batch() @ weight))).backward()
    leaves = [weight, scale, *network.parameters()]
    expected = [leaf.grad for leaf in leaves]
    _, store = sbp.segmented_backward(parts, _batch(), loss)
    assert all(torch.equal(store[leaf], grad) for leaf, grad in zip(leaves, expected, strict=True))


def test_micro_batches_add_up_in_a_store_that_is_given() -> None:
    plain, cut = _network().eval(), _network().eval()
    store = sbp.GradStore(cut)
    for batch in _batch().split(8):
        _loss(plain(batch)).backward()
        _, returned = sbp.segmented_backward(cut, batch, _loss, num_segments=3, store=store)
        assert returned is store
    store.apply()
    _assert_same(plain, cut)


def test_leading_segments_that_are_frozen_run_once() -> None:
    plain, cut, x = _network(), _network(), _batch()
    counts = dict.fromkeys(range(7), 0)

    def count(number: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[number] += 1

        return hook

    for network in (plain, cut):
        network[:2].requires_grad_(False)
        network[3].requires_grad_(False)
    for number, part in enumerate(cut):
        part.register_forward_hook(count(number))
    torch.manual_seed(1)
    _loss(plain(x)).backward()
    torch.manual_seed(1)
    sbp.segmented_backward(cut, x, _loss)[1].apply()
    _assert_same(plain, cut)
    assert list(counts.values()) == [1, 1, 2, 2, 2, 2, 1]


def test_autocast_around_forward_and_backward_keeps_no_cast_without_a_graph() -> None:
    cells = []
    for cut in (False, True):
        torch.manual_seed(0)
        cell = nn.Linear(8, 8)
        with torch.autocast("cpu", torch.bfloat16):
            if cut:
                sbp.segmented_backward([cell] * 4, _batch(), _loss)[1].apply()
            else:
                _loss(cell(cell(cell(cell(_batch()))))).backward()
        cells.append(cell)
    torch.testing.assert_close(cells[0].weight.grad, cells[1].weight.grad, rtol=2e-2, atol=1e-4)


def test_autograd_holds_the_activations_of_one_segment_at_a_time_beside_the_inputs() -> None:
    network = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(9)))
    x, stream = _batch(requires_grad=True), 16 * 8 * 4
    with live_bytes(network.parameters()) as whole:
        _loss(network(x)).backward()
    # Each linear saves its input, each tanh its output, which is the next one's input; the square saves the last.
    assert whole.peak == 10 * stream
    with live_bytes(network.parameters()) as live:
        sbp.segmented_backward(network, x, _loss, num_segments=3)
    assert live.peak == 4 * stream
    assert live.now == 0


def test_an_input_is_let_go_when_its_segment_is_done() -> None:
    alive: list[int] = []
    inputs: list[weakref.ref[Tensor]] = []

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():  # run with a graph, the last one first
                alive.append(sum(ref() is not None for ref in inputs))
            else:
                inputs.append(weakref.ref(x))
            return super().forward(x)

    sbp.segmented_backward([Noting(8, 8) for _ in range(5)], _batch(), _loss)
    assert alive == [4, 4, 3, 2, 1]


MISUSES: list[tuple[Callable[[], Any], type[SparseBPError], str]] = [
    (lambda: sbp.segmented_backward([], _batch(), _loss), UsageError, "from 1 to the number of modules, got 0"),
    (
        lambda: sbp.segmented_backward(_network(), _batch(), _loss, num_segments=8),
        UsageError,
        "the number of modules, got 8 segments of 7",
    ),
    (
        lambda: sbp.segmented_backward(_network(), _batch(), _loss, num_segments=0),
        UsageError,
        "got 0 segments of 7",
    ),
    (lambda: sbp.segmented_backward([3], _batch(), _loss), UsageError, "must be a module or a function, got int"),
    (
        lambda: sbp.segmented_backward(_network(), _batch() * _batch(requires_grad=True), _loss),
        UsageError,
        "x must be a leaf",
    ),
    (lambda: sbp.segmented_backward(_network(), _batch(), lambda y: y), UsageError, r"got shape \(16, 2\)"),
    (lambda: sbp.segmented_backward(_network(), _batch(), lambda y: 1.0), UsageError, "one number, got float"),
    (
        lambda: sbp.segmented_backward(_network().requires_grad_(False), _batch(), _loss),
        UsageError,
        "nothing to differentiate",
    ),
    (
        lambda: sbp.segmented_backward([nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Tanh()], _batch(), _loss),
        UnsupportedError,
        "segment 1 must not change its input in place",
    ),
    (lambda: sbp.segmented_backward(nn.Linear(8, 2), _batch(), _loss), UsageError, "several modules, got Linear"),
    (lambda: sbp.segmented_backward(_network(), _batch(), None), UsageError, "loss_fn must be a function .* NoneType"),
    (
        lambda: sbp.segmented_backward(_network(), _batch(), _loss, num_segments=2.0),
        UsageError,
        "num_segments must be a whole number, got 2.0",
    ),
    (
        lambda: sbp.segmented_backward(_network(), _batch(), _loss, store={}),
        UsageError,
        "store must be a GradStore, got dict",
    ),
]


@pytest.mark.parametrize(("misuse", "error", "text"), MISUSES)
def test_what_cannot_be_run_is_one_clear_line(misuse: Callable[[], Any], error: type[SparseBPError], text: str) -> None:
    with pytest.raises(error, match=text):
        misuse()


def test_without_gradients_it_is_refused() -> None:
    with torch.no_grad(), pytest.raises(UsageError, match=r"outside torch.no_grad"):
        sbp.segmented_backward(_network(), _batch(), _loss)
