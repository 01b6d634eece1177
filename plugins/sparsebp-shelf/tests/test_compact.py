"""A projection of an input's features: its mean, its variance by the formulas, and that nothing else is stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebp_cli.policy import Site, Step
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_shelf.policies.compact import CompAct
from sparsebp_shelf.saver import SavedProjection

DRAWS = 2_000


def save(policy: CompAct, x: Tensor, draw: int = 0) -> SavedProjection:
    saved = policy.save(x, Site("layer", 6, (len(x),)), Step(0, draw=draw))
    assert saved is not None
    return saved


def test_keep_1_trains_as_dense_bit_for_bit() -> None:
    assert equal(train_network(CompAct(keep=1.0)), train_network(None))


def test_mean_and_variance_over_draws_are_those_of_the_formula() -> None:
    """|dW|^2 (D + 1) / K: no property of the rows matters."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(5, width, dtype=torch.float64, generator=generator) for width in (16, 4))
    dense, policy = grad.t() @ x, CompAct(keep=0.5)
    draws = [grad.t() @ save(policy, x, number).restore() for number in range(1, 2 * DRAWS + 1)]
    error = sum(float((one - dense).square().sum()) for one in draws) / len(draws)
    assert error == pytest.approx(float(dense.square().sum()) * 17 / 8, rel=0.05)
    assert float((torch.stack(draws).mean(0) - dense).norm()) <= 4 * (error / len(draws)) ** 0.5


def test_the_matrix_is_drawn_again_and_not_stored() -> None:
    saved = save(CompAct(keep=0.25), torch.randn(32, 8))
    assert torch.equal(saved.draw(), saved.draw())
    assert [tuple(tensor.shape) for tensor in saved.tensors] == [(32, 2)]
