"""Eager updates in the loops that people write: two optimizers, sparse embeddings, passes that break off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError


class Breaking(torch.autograd.Function):
    """Does nothing, until its backward is to break off."""

    error: BaseException | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Breaking.error is not None:
            raise Breaking.error
        return grad


class Stack(nn.Module):
    """Four layers; the backward may break off before it comes to one of them."""

    def __init__(self, breaks_before: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.breaks_before = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), breaks_before

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            x = Breaking.apply(x) if number == self.breaks_before else x
        return x.square().sum()


def given(step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("by", [None, "exact", "parameter", "previous"])
def test_what_is_not_the_optimizers_has_the_gradients_of_one_pass(by: str | None) -> None:
    results = []
    for eager in (False, True):
        model = Stack()
        first, second = list(model.layers[2:].parameters()), list(model.layers[:2].parameters())
        optimizers = torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.Adam(second, lr=0.01)
        options: dict[str, Any] = {"update": "eager"} if eager else {}
        if eager and by is not None:
            options |= {"max_grad_norm": 0.1, "eager_clip": by}
        seen, before = [], None
        with sbp.attach(model, [], optimizer=optimizers[0], **options) as engine:
            for step in range(3):
                x = given(step).requires_grad_()
                engine.backward(model(x))
                if not eager and by is not None:
                    before = _clip(first, by, before)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(x.grad)
        results.append([*values(model), *seen])
    for plain, found in zip(*results, strict=True):
        assert torch.equal(found, plain)


def _clip(parameters: list[nn.Parameter], by: str, before: Tensor | None) -> Tensor:
    """The plain definition of each way to clip to 0.1."""
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    for p in parameters:
        assert p.grad is not None
        norm = {"exact": total, "previous": before}.get(by)
        torch.nn.utils.clip_grads_with_norm_([p], 0.1, p.grad.norm() if norm is None else norm)
    return total


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients_of_embeddings_update_eagerly(kind: Callable[..., torch.optim.Optimizer]) -> None:
    results = []
    for options in ({}, {"update": "eager"}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
        optimizer, head = kind(model[0].parameters(), lr=0.1), torch.optim.SGD(model[1].parameters(), lr=0.1)
        with sbp.attach(model, [], optimizer=optimizer, **options) as engine:
            for step in range(3):
                engine.backward(model(torch.tensor([1, 1, step, 5])).square().sum())
                for each in (optimizer, head):
                    each.step()
                    each.zero_grad()
            if options:
                report = engine.eager.report
                assert report.num_early == 1
                assert report.gradient_bytes == 4 * (8 + 4 * 4)  # of each row its number and itself
        results.append(values(model))
    for plain, found in zip(*results, strict=True):
        assert torch.equal(found, plain)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["memory", "ctrl-c"])
@pytest.mark.parametrize("clip", [None, "exact"])
def test_a_pass_that_breaks_off_says_how_far_it_came_and_nothing_is_applied_twice(
    error: BaseException, clip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack(breaks_before=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options: dict[str, Any] = {} if clip is None else {"max_grad_norm": 1.0, "eager_clip": clip}
    with sbp.attach(model, [], optimizer=optimizer, update="eager", **options) as engine:
        before = values(model)
        monkeypatch.setattr(Breaking, "error", error)
        with pytest.raises(type(error)) as caught:
            engine.backward(model(given(0)))
        monkeypatch.undo()
        changed = [not torch.equal(a, b) for a, b in zip(before, values(model), strict=True)]
        if clip == "exact":  # the first pass only looks
            assert not any(changed)
        else:
            assert changed == [False] * 4 + [True] * 4
            said = "broke off after 4 of 8 parameters had been updated"
            assert any(said in note for note in caught.value.__notes__)
            with pytest.raises(UsageError, match=f"{said}: load a checkpoint, or call optimizer.step()"):
                engine.backward(model(given(1)))
            optimizer.step()
        assert all(p.grad is None for p in model.parameters())
        engine.backward(model(given(1)))  # and on it goes
        optimizer.step()
        assert engine.eager.report.num_early == 8


def test_a_pass_that_fails_before_anything_changed_may_be_tried_again() -> None:
    model, twin = Stack(), Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with sbp.attach(model, [], optimizer=optimizer, update="eager") as engine:
        with pytest.raises(RuntimeError, match="does not require grad"):
            engine.backward(torch.zeros(()))
        engine.backward(model(given(0)))
        optimizer.step()
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    twin(given(0)).backward()
    plain.step()
    for found, expected in zip(values(model), values(twin), strict=True):
        assert torch.equal(found, expected)


def test_an_error_inside_the_optimizers_step_leaves_its_groups_as_they_are() -> None:
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step.__wrapped__(self, closure)  # type: ignore[attr-defined]
            if self.fails:
                raise KeyboardInterrupt

    model = Stack()
    optimizer = Failing(model.parameters(), lr=0.1)
    groups, num = optimizer.param_groups, len(optimizer.param_groups[0]["params"])
    with sbp.attach(model, [], optimizer=optimizer, update="eager") as engine:
        optimizer.fails = True
        with pytest.raises(KeyboardInterrupt) as caught:
            engine.backward(model(given(0)))
        assert any("after 1 of 8 parameters" in note for note in caught.value.__notes__)
        assert optimizer.param_groups is groups
        assert len(groups[0]["params"]) == num
        last = model.layers[3].bias.detach().clone()
        optimizer.fails = False
        optimizer.step()
        assert torch.equal(model.layers[3].bias, last)  # what was updated already is not updated again


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="the optimizer has no parameter of Stack"):
        sbp.attach(Stack(), [], optimizer=torch.optim.SGD(Stack().parameters(), lr=0.1), update="eager")


def test_a_store_in_place_of_the_backward_is_refused() -> None:
    model = Stack()
    with (
        sbp.attach(model, [], optimizer=torch.optim.SGD(model.parameters(), lr=0.1), update="eager") as engine,
        pytest.raises(UnsupportedError, match="before a GradStore could collect it"),
    ):
        engine.backward(model(given(0)), sbp.GradStore().backward)


@pytest.mark.parametrize("norm", ["1.0", True, -1.0, 0, float("nan")])
def test_a_norm_that_is_no_positive_number_is_refused(norm: Any) -> None:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=f"max_grad_norm must be a number greater than 0, got {norm!r}"):
        sbp.attach(model, [], optimizer=optimizer, update="eager", max_grad_norm=norm, eager_clip="exact")


KINDS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in (torch.optim.LBFGS, torch.optim.SparseAdam)])
def test_every_optimizer_of_pytorch_updates_eagerly_as_it_does_otherwise(kind: Any) -> None:
    results = []
    for options in ({}, {"update": "eager"}):
        model = Stack()
        weights = [layer.weight for layer in model.layers]  # Muon takes matrices alone
        groups = [{"params": weights[:1], "lr": 0.02}, {"params": weights[1:], "weight_decay": 0.1}]
        groups = [{"params": weights}] if kind is torch.optim.Rprop else groups  # it has no decay
        optimizer = kind(groups, lr=0.01)
        with sbp.attach(model, [], optimizer=optimizer, **options) as engine:
            for step in range(3):
                engine.backward(model(given(step)))
                optimizer.step()
                optimizer.zero_grad()
        results.append(values(model))
    for plain, found in zip(*results, strict=True):
        assert torch.equal(found, plain)


def test_an_optimizer_that_looks_at_the_whole_model_is_refused() -> None:
    model = Stack()
    with pytest.raises(UnsupportedError, match=r"does not work with LBFGS, whose step\(\) needs a closure"):
        sbp.attach(model, [], optimizer=torch.optim.LBFGS(model.parameters()), update="eager")
