"""Selectors that see more than the gradient, and select dgrad and wgrad apart."""

from __future__ import annotations

from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sparsebp_cli as sbp
from sparsebp_cli.backward.linear import reading
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import (
    Blocks,
    Budget,
    Columns,
    Elements,
    InformedSelector,
    Reading,
    Rows,
    Seen,
    Selection,
    Site,
    Split,
    SplitTypes,
    Step,
    choice,
)
from sparsebp_cli.testing.selector import check_selector
from tests.promise import Nothing

Execution = Literal["fast", "reference"]


class Informed(Nothing, InformedSelector):
    """Select what the test says, and note what it saw."""

    given: Any = None
    names: frozenset[Reading] = frozenset()
    saw: Any = None

    @property
    def reads(self) -> frozenset[Reading]:
        return self.names

    @property
    def budget(self) -> float | Budget:
        return 1.0

    @property
    def selection(self) -> type[Selection] | None:
        return None if self.given is None else type(self.given.wgrad)

    @property
    def split(self) -> SplitTypes | None:
        if self.given is None:
            return None
        kinds = (None if part is None else type(part) for part in (self.given.dgrad, self.given.wgrad))
        return SplitTypes(*kinds)

    def choose(self, seen: Seen, site: Site, step: Step) -> Selection | Split | None:
        if self.saw is not None:
            self.saw.append((site.name, seen))
        return self.given


def selections() -> dict[str, Selection | None]:
    generator = torch.Generator().manual_seed(0)
    return {
        "dense": None,
        "rows": Rows(torch.tensor([5, 0, 3]), torch.tensor([2.0, 0.5, 1.0])),
        "columns": Columns(torch.tensor([6, 1]), torch.tensor([3.0, 1.0])),
        "blocks": Blocks(torch.tensor([0, 3]), (2, 3)),
        "elements": Elements(torch.tensor([4, 17])),
        "2:4": choice.choose_two_of_four(torch.rand(6, 7, generator=generator)),
    }


def by_autograd(layer: nn.Linear, x: Tensor, grad: Tensor, split: Split) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias, each by PyTorch on the gradient that is left for it."""

    def left(part: Selection | None) -> tuple[Tensor, Tensor, Tensor]:
        masked = grad if part is None else part.apply(grad)
        return torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), masked)

    dgrad, _, _ = left(split.dgrad)
    _, wgrad, bias = left(split.wgrad)
    return dgrad, wgrad, left(None)[2] if split.full_bias else bias


@pytest.mark.parametrize("execution", ["fast", "reference"])
@pytest.mark.parametrize("full_bias", [False, True])
@pytest.mark.parametrize("wgrad", selections())
@pytest.mark.parametrize("dgrad", selections())
def test_each_product_is_of_its_own_selection(dgrad: str, wgrad: str, full_bias: bool, execution: Execution) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 7).double(), torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    grad, kinds = torch.randn(6, 7, dtype=torch.float64), selections()
    split = Split(kinds[dgrad], kinds[wgrad], full_bias)
    expected = by_autograd(layer, x, grad, split)
    with sbp.attach(layer, Informed(given=split), execution=execution) as engine:
        engine.backward((layer(x) * grad).sum())
    for ours, theirs in zip((x.grad, layer.weight.grad, layer.bias.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["weight", "input", "bias"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    layer, x = nn.Linear(5, 7), torch.randn(6, 5, requires_grad=frozen != "input")
    if frozen != "input":
        getattr(layer, frozen).requires_grad_(False)
    saw: list[Any] = []
    split = Split(Columns(torch.tensor([1])), Rows(torch.tensor([2])))
    with sbp.attach(layer, Informed(given=split, saw=saw, names=frozenset({"input", "input_norm"}))) as engine:
        engine.backward(layer(x).sum())
    found = {"weight": layer.weight.grad, "input": x.grad, "bias": layer.bias.grad}
    assert [name for name, gradient in found.items() if gradient is None] == [frozen]
    _, seen = saw[0]
    assert (seen.needs_dgrad, seen.needs_wgrad) == (frozen != "input", frozen != "weight")
    assert torch.equal(seen.input, x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(self.q(x) * self.k(x) + self.v(x))
        return out


ALL: frozenset[Reading] = frozenset({"input", "input_norm", "weight_norm"})


def test_a_policy_reads_the_input_and_the_norms_of_input_and_weight() -> None:
    torch.manual_seed(0)
    model, x, saw = Attention(), torch.randn(2, 3, 8), list[Any]()
    with sbp.attach(model, Informed(names=ALL, saw=saw)) as engine:
        engine.backward(model(x).sum())
    seen = dict(saw)["q"]
    torch.testing.assert_close(seen.input, x.view(6, 8))
    torch.testing.assert_close(seen.input_norm, x.view(6, 8).norm(dim=1))
    torch.testing.assert_close(seen.weight_norm, model.q.weight.norm(dim=1).detach())
    assert not any(norm.requires_grad for norm in seen.readings.values())


def test_an_input_norm_is_computed_once_for_linears_that_read_one_tensor() -> None:
    model, x, saw = Attention(), torch.randn(2, 3, 8), list[Any]()
    with (
        sbp.attach(model, Informed(names=frozenset({"input_norm"}), saw=saw)) as engine,
        patch.object(reading, "row_norm", wraps=reading.row_norm) as norm,
    ):
        engine.backward(model(x).sum())
        assert norm.call_count == 2  # of x, and of what o reads
    seen = dict(saw)
    assert seen["q"].input_norm is seen["k"].input_norm is seen["v"].input_norm


def test_an_input_that_was_changed_in_place_is_read_again() -> None:
    model, saw = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), list[Any]()
    x = torch.ones(2, 3)
    with sbp.attach(model, Informed(names=frozenset({"input_norm"}), saw=saw)) as engine, torch.enable_grad():
        model[0].weight.requires_grad_(False)
        first = model[0](x)
        x.mul_(2)
        engine.backward((first + model[1](x)).sum())
    norms = {name: seen.input_norm for name, seen in saw}
    torch.testing.assert_close(norms["1"], 2 * norms["0"])


def test_nothing_is_read_that_nobody_names() -> None:
    model = Attention()
    with sbp.attach(model, Informed(saw=[])) as engine, patch.object(choice, "norm", side_effect=AssertionError):
        engine.backward(model(torch.randn(2, 3, 8)).sum())
    with pytest.raises(
        UsageError, match="input_norm was not requested: add this name to the policy's property 'reads'"
    ):
        Seen(torch.zeros(1, 1)).input_norm  # noqa: B018


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_norms_are_in_float32_and_do_not_underflow(size: float, dtype: torch.dtype) -> None:
    x = (torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.6, 0.8]], dtype=torch.float64) * size).to(dtype)
    norm = choice.norm(x, 1)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double() / size, torch.tensor([5.0, 0.0, 1.0]).double(), rtol=0.01, atol=0)
    assert choice.norm(x[:0], 1).shape == (0,)
    assert choice.norm(x[:0], 0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1e-5, 1.0, 1e10, 1e18, 1e30])
def test_norms_of_rows_are_those_of_float64_at_every_scale(scale: float) -> None:
    """On both sides of the sizes at which rows are read once."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 33, generator=generator) * torch.logspace(0, -6, 9)[:, None] * scale
    torch.testing.assert_close(choice.norm(x, 1), x.double().norm(dim=1).float(), rtol=1e-5, atol=0.0)
    x[2, 3] = torch.nan
    assert choice.norm(x, 1).isnan().tolist() == [row == 2 for row in range(9)]


def test_norms_are_the_same_under_checkpointing() -> None:
    torch.manual_seed(0)
    model, x, saw = Attention(), torch.randn(2, 3, 8, requires_grad=True), list[Any]()
    with sbp.attach(model, Informed(names=ALL, saw=saw)) as engine:
        engine.backward(model(x).sum())
        engine.backward(checkpoint(model, x, use_reentrant=False).sum())
    plain, again = saw[:4], dict(saw[4:])
    assert len(again) == 4
    for name, seen in plain:
        assert all(torch.equal(norm, again[name].readings[key]) for key, norm in seen.readings.items())


def test_nodes_refuse_by_name() -> None:
    model = Attention()
    text = "Informed reads inputs and weights of linears: needs sites='linears', got 'nodes'"
    with pytest.raises(UnsupportedError, match=text):
        sbp.attach(model, Informed(), sites="nodes")
    assert "forward" not in vars(model.q)


class ByLayer(Informed):
    """Keeps 0.2 of the rows in layer 0 and 0.8 above; says what the test says."""

    honest: bool = True

    @property
    def budget(self) -> float:
        return 0.8 if self.honest else 0.2

    @property
    def selection(self) -> type[Selection] | None:
        return Rows

    def budget_at(self, site: Site, step: Step) -> float:
        return (0.2 if site.layer == 0 else 0.8) if self.honest else 0.2

    def choose(self, seen: Seen, site: Site, step: Step) -> Selection | Split | None:
        return choice.choose_rows(choice.norm(seen.grad_NO, 1), 0.2 if site.layer == 0 else 0.8)


def test_the_suite_finds_a_layer_that_keeps_more_than_the_budget() -> None:
    check_selector(ByLayer())
    with pytest.raises(AssertionError, match=r"keeps .* in layer 1, but its budget 0.2 allows"):
        check_selector(ByLayer(honest=False))


def test_the_claim_of_a_layer_is_its_own() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
    x = torch.randn(10, 16, requires_grad=True)
    with sbp.attach(model, ByLayer()) as engine:
        engine.backward(model.layers[1](model.layers[0](x)).sum())
        claim, report = engine.claim(), engine.report()
    assert claim.claimed_flops == pytest.approx(claim.dense_flops * 0.5)
    assert report.kept_share == pytest.approx(0.5)


class Apart(Informed):
    """Columns for dgrad, rows for wgrad."""

    keep_columns: float = 0.5
    claims: float = 0.25

    @property
    def budget(self) -> Budget:
        return Budget(dgrad=self.keep_columns, wgrad=self.claims)

    @property
    def split(self) -> SplitTypes:
        return SplitTypes(Columns, Rows)

    @property
    def selection(self) -> type[Selection]:
        return Rows

    def choose(self, seen: Seen, site: Site, step: Step) -> Split:
        norms = choice.norm(seen.grad_NO, 0), choice.norm(seen.grad_NO, 1)
        return Split(choice.choose_columns(norms[0], self.keep_columns), choice.choose_rows(norms[1], 0.25))


@pytest.mark.parametrize(("input_grad", "weight_grad", "left"), [(1, 1, 0.375), (1, 0, 0.5), (0, 1, 0.25)])
def test_what_is_executed_is_what_is_claimed(input_grad: int, weight_grad: int, left: float) -> None:
    layer = nn.Linear(16, 32)
    layer.weight.requires_grad_(bool(weight_grad))
    x = torch.randn(64, 16, requires_grad=bool(input_grad))
    with sbp.attach(layer, Apart()) as engine:
        loss = layer(x).square().sum()
        with sbp.backward.count_flops() as count:
            engine.backward(loss)
        claim, report = engine.claim(), engine.report()
    assert count.total == claim.claimed_flops == pytest.approx(left * claim.dense_flops)
    assert report.kept_share == pytest.approx(0.375)


def test_the_suite_checks_the_share_of_each_product() -> None:
    check_selector(Apart())
    with pytest.raises(AssertionError, match=r"its budget 0\.1 allows"):
        check_selector(Apart(claims=0.1))


def test_a_probe_allows_what_a_mean_budget_draws() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(20, 8, requires_grad=True)

    class Mean(Apart):
        @property
        def budget(self) -> Budget:
            return Budget(0.1, 0.1, is_mean=True)

    with sbp.attach(layer, Mean()) as engine, engine.probing(1):
        engine.backward(layer(x).sum())
        site = engine.report().sites[0]
    assert site.claimed_flops == pytest.approx(0.1 * site.dense_flops)
    assert site.allowed_flops == pytest.approx(0.375 * site.dense_flops)


def test_a_selector_that_sees_more_is_not_asked_with_the_gradient_alone() -> None:
    with pytest.raises(UsageError, match="Informed needs more than the gradient: call choose"):
        Informed().select(torch.zeros(1, 1), Site("layer", 1, (1,)), Step(0))
