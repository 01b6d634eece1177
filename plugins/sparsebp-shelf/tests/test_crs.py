"""Column-row sampling of both products of a linear's backward."""

from __future__ import annotations

import itertools
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops
from sparsebp_cli.policy import Rows, Seen, Site, Split, Step, choice, make_policies
from sparsebp_cli.testing import check_policy
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_shelf import sampling
from sparsebp_shelf.policies.crs import CRS

DRAWS = 4_000


def factors(num_rows: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Return an input, a gradient and a weight whose rows have very different norms."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 4, dtype=torch.float64, generator=generator)
    spread = (torch.rand(num_rows, 1, generator=generator).double() * 3).exp()
    grad = torch.randn(num_rows, 12, dtype=torch.float64, generator=generator) * spread
    return x, grad, torch.randn(12, 4, dtype=torch.float64, generator=generator) * torch.arange(1, 13)[:, None]


def choose(policy: CRS, x: Tensor, grad: Tensor, weight: Tensor, draw: int = 0) -> Split:
    known = {"input_norm": choice.norm(x, 1), "weight_norm": choice.norm(weight, 1)}
    seen = Seen(grad, readings={name: known[name] for name in policy.reads})
    split = policy.choose(seen, Site("layer", grad.shape[1], (len(grad),)), Step(0, draw=draw))
    assert split is not None
    return split


def products(split: Split, x: Tensor, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return dgrad and wgrad of what is kept."""
    left = [grad if part is None else part.apply(grad) for part in (split.dgrad, split.wgrad)]
    return left[0] @ weight, left[1].t() @ x


@pytest.mark.parametrize("products", ["wgrad", "dgrad", "both"])
def test_keep_1_trains_as_dense_bit_for_bit(products: Literal["wgrad", "dgrad", "both"]) -> None:
    assert equal(train_network(CRS(keep=1.0, products=products)), train_network(None))


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_over_all_bernoulli_draws_of_six_rows_is_the_dense_gradient(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, grad, weight = (torch.randn(6, 5, dtype=torch.float64, generator=generator) for _ in range(3))
    policy = CRS(keep=0.5, products="both", draw="bernoulli")
    grad = grad[:, :5] * torch.tensor([9.0, 1, 1, 2, 0.1, 0.5]).double()[:, None]
    weight = weight[:5]
    given: list[Tensor] = []

    def note(probability: Tensor, generator: torch.Generator) -> Tensor:
        given.append(probability)
        return torch.arange(len(probability))

    with patch.object(sampling, "draw_independently", note):
        choose(policy, x, grad, weight)
    mean_dgrad, mean_wgrad = torch.zeros(6, 5).double(), torch.zeros(5, 5).double()
    for kept in itertools.product((False, True), repeat=6):
        for features in itertools.product((False, True), repeat=5):
            masks = [torch.tensor(kept), torch.tensor(features)]
            chances = [torch.where(mask, p, 1 - p).prod() for mask, p in zip(masks, given, strict=True)]
            drawn = iter([mask.nonzero().flatten() for mask in masks])
            with patch.object(sampling, "draw_independently", lambda *_: next(drawn)):  # noqa: B023
                dgrad, wgrad = products(choose(policy, x, grad, weight), x, grad, weight)
            mean_dgrad += chances[0] * chances[1] * dgrad
            mean_wgrad += chances[0] * chances[1] * wgrad
    torch.testing.assert_close(mean_dgrad, grad @ weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mean_wgrad, grad.t() @ x, rtol=1e-6, atol=1e-6)


def test_the_variance_of_the_paper_s_example_is_exact() -> None:
    # A B with A = [[1,2,3],[4,5,6]], B = [[1,0],[0,2],[3,1]], two of three: 88.8144.
    grad, x = torch.tensor([[1.0, 4], [2, 5], [3, 6]]).double(), torch.tensor([[1.0, 0], [0, 2], [3, 1]]).double()
    policy, error = CRS(keep=2 / 3, draw="bernoulli"), 0.0
    probability = sampling.water_fill(grad.norm(dim=1) * x.norm(dim=1), 2)
    for kept in itertools.product((False, True), repeat=3):
        mask = torch.tensor(kept)
        with patch.object(sampling, "draw_independently", lambda *_: mask.nonzero().flatten()):  # noqa: B023
            _, wgrad = products(choose(policy, x, grad, x), x, grad, x[:2])
        chance = float(torch.where(mask, probability, 1 - probability).prod())
        error += chance * float((wgrad - grad.t() @ x).square().sum())
    assert error == pytest.approx(88.8144, abs=1e-3)


@pytest.mark.parametrize("draw", ["fixed", "bernoulli"])
def test_mean_and_variance_over_draws_are_those_of_the_formula(draw: Literal["fixed", "bernoulli"]) -> None:
    x, grad, weight = factors()
    policy = CRS(keep=0.25, products="both", draw=draw)
    dense = grad @ weight, grad.t() @ x
    totals, errors = [torch.zeros_like(one) for one in dense], [0.0, 0.0]
    for number in range(1, DRAWS + 1):
        for place, one in enumerate(products(choose(policy, x, grad, weight, number), x, grad, weight)):
            totals[place] += one
            errors[place] += float((one - dense[place]).square().sum()) / DRAWS
    sizes = grad.norm(dim=0) * weight.norm(dim=1), grad.norm(dim=1) * x.norm(dim=1)
    for place, size in enumerate(sizes):
        formula = float(sampling.variance(size, sampling.water_fill(size, len(size) // 4)))
        assert errors[place] == pytest.approx(formula, rel=0.05 if draw == "bernoulli" else 0.25)
        off = float((totals[place] / DRAWS - dense[place]).norm())
        assert off <= 4 * (errors[place] / DRAWS) ** 0.5


def test_leverage_varies_less_than_uniform_draws() -> None:
    x, grad, weight = factors()
    spread = []
    for by in ("leverage", "uniform"):
        policy = CRS.model_validate({"keep": 0.25, "by": by})
        draws = [products(choose(policy, x, grad, weight, n), x, grad, weight)[1] for n in range(1, 500)]
        spread.append(sum(float((one - grad.t() @ x).square().sum()) for one in draws))
    assert spread[0] < 0.5 * spread[1]


@pytest.mark.parametrize(("products", "left"), [("wgrad", 0.625), ("dgrad", 0.625), ("both", 0.25)])
def test_what_is_executed_is_what_is_claimed(products: str, left: float) -> None:
    layer, x = nn.Linear(16, 32), torch.randn(64, 16, requires_grad=True)
    with sbp.attach(layer, CRS.model_validate({"keep": 0.25, "products": products})) as engine:
        loss = layer(x).square().sum()
        with count_flops() as count:
            engine.backward(loss)
        claim = engine.claim()
    assert count.total == claim.claimed_flops == left * claim.dense_flops


def test_the_bias_gets_the_whole_gradient_and_dgrad_is_dense() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 8), torch.randn(20, 6, requires_grad=True)
    found: list[Any] = []
    for policy in (None, CRS(keep=0.2)):
        layer.zero_grad()
        x.grad = None
        if policy is None:
            layer(x).square().sum().backward()
        else:
            with sbp.attach(layer, policy) as engine:
                engine.backward(layer(x).square().sum())
        assert layer.bias.grad is not None
        assert x.grad is not None
        found.append((x.grad.clone(), layer.bias.grad.clone()))
    assert all(torch.equal(dense, ours) for dense, ours in zip(*found, strict=True))


def test_a_fixed_draw_keeps_exactly_that_many_rows() -> None:
    x, grad, weight = factors()
    for number in range(50):
        rows = choose(CRS(keep=0.3), x, grad, weight, number).wgrad
        assert isinstance(rows, Rows)
        assert rows.index_K.unique().numel() == round(0.3 * 24)


def test_norms_so_small_that_their_product_underflows_still_rank_rows() -> None:
    x, grad, weight = (value.float() for value in factors())
    small = choose(CRS(keep=0.25), x * 1e-25, grad * 1e-25, weight).wgrad
    usual = choose(CRS(keep=0.25), x, grad, weight).wgrad
    assert isinstance(small, Rows)
    assert isinstance(usual, Rows)
    assert torch.equal(small.index_K, usual.index_K)


def test_the_control_draws_uniformly_at_the_same_budget() -> None:
    policy = CRS(keep=0.25, products="both", draw="bernoulli", layers=[0])
    assert policy.control is not None
    (control,) = make_policies(policy.control)
    assert isinstance(control, CRS)
    assert (control.by, control.budget, control.layers, control.reads) == ("uniform", policy.budget, [0], frozenset())
    check_policy("crs", keep=0.5, products="both")
