"""Inputs in a few bits: the grid, the mean and the variance of what is restored, and the bytes."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from sparsebp_cli.policy import Site, Step
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_shelf.policies.gact import GACT
from sparsebp_shelf.policies.saved_codes import SavedCodes

DRAWS = 2_000
Bits = Literal[2, 4, 8, 32]


def save(policy: GACT, x: Tensor, draw: int = 0) -> SavedCodes:
    saved = policy.save(x, Site("layer", 6, (len(x),)), Step(0, draw=draw))
    assert saved is not None
    return saved


def some(num_rows: int = 32, num_features: int = 24) -> Tensor:
    return torch.randn(num_rows, num_features, generator=torch.Generator().manual_seed(0))


def test_32_bits_train_as_dense_bit_for_bit() -> None:
    assert equal(train_network(GACT(bits=32)), train_network(None))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_entries_on_the_grid_are_restored_exactly(bits: Bits) -> None:
    codes = torch.arange(2**bits).float()
    x = (codes.repeat(-(-256 // len(codes)))[:256] * 0.25 - 3.0).view(16, 16)
    for draw in range(20):
        assert torch.equal(save(GACT(bits=bits), x, draw).restore(), x)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mean_and_variance_over_draws_are_those_of_stochastic_rounding(bits: Bits) -> None:
    x, group = some(), 64
    draws = torch.stack([save(GACT(bits=bits, group=group), x, n).restore() for n in range(1, DRAWS + 1)]).double()
    flat = x.double().view(-1, group)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    fraction = ((flat - low) / step).frac()
    expected = (step.square() * fraction * (1 - fraction)).view(x.shape)
    error = (draws.mean(0) - x).abs()
    assert bool((error <= 6 * (expected / DRAWS).sqrt() + 2 / DRAWS * step.max()).all())
    assert float((draws - x).square().mean(0).sum()) == pytest.approx(float(expected.sum()), rel=0.05)
    within = (draws - x).abs().view(DRAWS, -1, group) <= step * (1 + 1e-5)
    assert bool(within.all())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shape", [(32, 24), (7, 5), (1, 1)])
def test_bytes_are_those_of_the_formula_and_a_last_group_is_filled_up(bits: Bits, shape: tuple[int, int]) -> None:
    x, policy = some(*shape), GACT(bits=bits, group=64)
    saved = save(policy, x)
    groups = -(-x.numel() // 64)
    assert saved.num_bytes == policy.count_bytes(*shape, 4) == groups * (64 * bits // 8 + 8)
    assert saved.restore().shape == x.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_an_input_comes_back_in_its_dtype_and_a_constant_group_exactly(dtype: torch.dtype) -> None:
    x = torch.full((8, 64), 0.375, dtype=dtype)
    restored = save(GACT(bits=2, group=64), x).restore()
    assert restored.dtype == dtype
    assert torch.equal(restored, x)


def test_an_entry_that_is_not_finite_stays_so() -> None:
    x = some()
    x[3, 3] = float("nan")
    assert bool(save(GACT(), x).restore()[3, 3].isnan())
