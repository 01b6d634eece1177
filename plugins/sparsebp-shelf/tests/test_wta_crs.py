"""Rows of an input that stay: their number, their probabilities, and the mean and variance of the weight's gradient."""

from __future__ import annotations

import itertools
from typing import Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sparsebp_cli.policy import Site, Step, choice, make_policies
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_shelf import sampling
from sparsebp_shelf.policies.wta_crs import WTACRS, count_winners, draw_published
from sparsebp_shelf.saver import SavedRows

DRAWS = 2_000
Draw = Literal["fixed", "published"]


def factors(num_rows: int = 24) -> tuple[Tensor, Tensor]:
    """Return an input whose rows have very different norms, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    spread = (torch.rand(num_rows, 1, generator=generator).double() * 3).exp()
    x = torch.randn(num_rows, 4, dtype=torch.float64, generator=generator) * spread
    return x, torch.randn(num_rows, 6, dtype=torch.float64, generator=generator)


def save(policy: WTACRS, x: Tensor, draw: int = 0) -> SavedRows:
    saved = policy.save(x, Site("layer", 6, (len(x),)), Step(0, draw=draw))
    assert saved is not None
    return saved


@pytest.mark.parametrize("draw", ["fixed", "published"])
def test_keep_1_trains_as_dense_bit_for_bit(draw: Draw) -> None:
    assert equal(train_network(WTACRS(keep=1.0, draw=draw)), train_network(None))


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.5, 0.2, 0.1, 0.1, 0.05, 0.05), {2: 1, 3: 1, 4: 2}),
        ((0.3, 0.3, 0.2, 0.1, 0.05, 0.05), {2: 0, 3: 0, 4: 2}),
        ((0.9, 0.02, 0.02, 0.02, 0.02, 0.02), {2: 1, 3: 1, 4: 1}),
        ((1 / 6,) * 6, {2: 0, 3: 0, 4: 0}),
    ],
)
def test_the_number_of_winners_is_that_of_the_paper_s_rule(shares: tuple[float, ...], expected: dict[int, int]) -> None:
    found = {kept: int(count_winners(torch.tensor(shares, dtype=torch.float64), kept)) for kept in expected}
    assert found == expected


@pytest.mark.parametrize(("winners", "variance"), [(0, 28.25), (1, 21.125), (2, 25.25)])
def test_the_published_draw_has_the_variance_of_the_worked_example(winners: int, variance: float) -> None:
    """Values (5, 2, 1, 3, -1, 0.5) with shares (.5, .2, .1, .1, .05, .05), three kept: the mean is their sum, 10.5."""
    value = torch.tensor([5.0, 2, 1, 3, -1, 0.5]).double()
    share = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05]).double()
    free = 3 - winners
    mean = square = 0.0
    for drawn in itertools.product(range(winners, 6), repeat=free):
        places = torch.tensor([*range(3)][:winners] + [0] * free)

        def choose(rest: Tensor, number: int, **_: object) -> Tensor:
            return torch.tensor([0] * (number - free) + list(drawn))  # noqa: B023

        with (
            patch("sparsebp_shelf.policies.wta_crs.count_winners", lambda *_: torch.tensor(winners)),
            patch.object(torch, "multinomial", choose),
        ):
            places, weight = draw_published(share, 3, torch.Generator())
        chance = float((share[list(drawn)] / share[winners:].sum()).prod())
        total = float((value[places] * weight).sum())
        mean, square = mean + chance * total, square + chance * total**2
    assert mean == pytest.approx(10.5)
    assert square - mean**2 == pytest.approx(variance)


@pytest.mark.parametrize("draw", ["fixed", "published"])
@pytest.mark.parametrize("by", ["norm", "uniform"])
def test_the_mean_over_draws_is_the_dense_gradient(draw: Draw, by: Literal["norm", "uniform"]) -> None:
    x, grad = factors()
    policy, dense = WTACRS(keep=0.25, draw=draw, by=by), grad.t() @ x
    draws = [grad.t() @ save(policy, x, number).restore() for number in range(1, DRAWS + 1)]
    error = sum(float((one - dense).square().sum()) for one in draws) / DRAWS
    assert float((torch.stack(draws).mean(0) - dense).norm()) <= 4 * (error / DRAWS) ** 0.5


def test_the_mean_over_all_draws_of_six_rows_is_the_input() -> None:
    """Each row drawn on its own with the probabilities that the policy computes, and weighted as it weights."""
    x, mean = factors(6)[0], torch.zeros(6, 4).double()
    given: list[Tensor] = []

    def note(probability: Tensor, number: int, generator: object) -> Tensor:
        given.append(probability)
        return torch.arange(len(probability))

    with patch.object(sampling, "draw", note):
        save(WTACRS(keep=0.5), x)
    torch.testing.assert_close(given[0], sampling.water_fill(x.norm(dim=1), 3))
    for kept in itertools.product((False, True), repeat=6):
        mask = torch.tensor(kept)
        with patch.object(sampling, "draw", lambda *_: mask.nonzero().flatten()):  # noqa: B023
            mean += torch.where(mask, given[0], 1 - given[0]).prod() * save(WTACRS(keep=0.5), x).restore()
    torch.testing.assert_close(mean, x, rtol=1e-6, atol=1e-6)


def test_the_variance_is_that_of_the_formula() -> None:
    x, grad = factors()
    probability, dense = sampling.water_fill(x.norm(dim=1), 6), grad.t() @ x
    formula = float(sampling.variance(x.norm(dim=1) * grad.norm(dim=1), probability))
    errors, generator = [], torch.Generator().manual_seed(1)
    for _ in range(2 * DRAWS):
        index = sampling.draw_independently(probability, generator)
        rows = SavedRows.of(x, index, sampling.weigh(probability, index))
        errors.append(float((grad.t() @ rows.restore() - dense).square().sum()))
    assert sum(errors) / len(errors) == pytest.approx(formula, rel=0.05)
    fixed = [
        float((grad.t() @ save(WTACRS(keep=0.25), x, n).restore() - dense).square().sum()) for n in range(1, DRAWS)
    ]
    assert sum(fixed) / len(fixed) == pytest.approx(formula, rel=0.25)  # pairs are not independent


def test_drawing_by_norm_varies_less_than_drawing_uniformly() -> None:
    x, grad = factors()
    spread = [
        sum(float((grad.t() @ (save(policy, x, n).restore() - x)).square().sum()) for n in range(1, 300))
        for policy in (WTACRS(keep=0.25), WTACRS(keep=0.25, by="uniform"))
    ]
    assert spread[0] < 0.5 * spread[1]


@pytest.mark.parametrize("draw", ["fixed", "published"])
def test_rows_of_zeros_do_no_harm(draw: Draw) -> None:
    x = torch.zeros(8, 4)
    policy = WTACRS(keep=0.5, draw=draw)
    assert torch.equal(save(policy, x).restore(), x)
    x[3] = 1.0
    assert torch.allclose(save(policy, x).restore(), x)


def test_a_fixed_draw_keeps_that_many_different_rows() -> None:
    for number in range(50):
        assert save(WTACRS(keep=0.3), factors()[0], number).index_K.unique().numel() == round(0.3 * 24)


def test_the_control_draws_uniformly_at_the_same_budget() -> None:
    policy = WTACRS(keep=0.25, draw="published", layers=[0])
    assert policy.control is not None
    (control,) = make_policies(policy.control)
    assert isinstance(control, WTACRS)
    assert (control.by, control.draw, control.keep, control.layers) == ("uniform", "published", 0.25, [0])
    assert control.count_bytes(24, 4, 8) == policy.count_bytes(24, 4, 8) == choice.count_kept(0.25, 24) * (4 * 8 + 8)
