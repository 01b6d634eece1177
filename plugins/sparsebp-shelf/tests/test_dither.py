"""Dithered gradients: a grid, the entry in the mean, the variance of the formula, and zeros as often as it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebp_cli.policy import Site, Step, Values
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_shelf.policies.dither import Dither

DRAWS = 4_000


def select(grad: Tensor, scale: float, draw: int = 0) -> Values:
    selection = Dither(scale=scale).select(grad, Site("layer", grad.shape[1], (len(grad),)), Step(0, draw=draw))
    assert isinstance(selection, Values)
    return selection


def test_scale_0_trains_as_dense_bit_for_bit() -> None:
    assert equal(train_network(Dither(scale=0.0)), train_network(None))


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_mean_variance_and_zeros_are_those_of_the_formulas(scale: float) -> None:
    """Variance step^2 f (1 - f) with the place f between two multiples; below one step, 0 with probability 1 - |v| /
    step."""
    grad = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step = scale * float(grad.std(correction=0))
    draws = torch.stack([select(grad, scale, draw).apply(grad) for draw in range(1, DRAWS + 1)])
    levels = draws / step
    torch.testing.assert_close(levels, levels.round(), rtol=0.0, atol=1e-9)
    place = grad / step - (grad / step).floor()
    variance = step**2 * place * (1 - place)
    assert bool(((draws.mean(0) - grad).abs() <= 6 * (variance / DRAWS).sqrt() + 1e-12).all())
    assert float(draws.var(0).sum()) == pytest.approx(float(variance.sum()), rel=0.05)
    near = grad.abs() < step
    zeros = (draws == 0.0).double().mean(0)[near]
    torch.testing.assert_close(zeros, 1 - grad.abs()[near] / step, rtol=0.0, atol=0.06)


def test_what_is_kept_is_counted_and_equal_entries_stay() -> None:
    grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    selection = select(grad, 2.0)
    kept = int(selection.num_kept(grad))
    assert kept == int((selection.apply(grad) != 0).sum())
    assert 0.2 < kept / grad.numel() < 0.45, (
        "a normal gradient has about 0.4 of its entries left at twice its deviation"
    )
    same = torch.full((4, 3), 0.5)
    assert torch.equal(select(same, 2.0).apply(same), same), "no deviation: nothing to round to"
