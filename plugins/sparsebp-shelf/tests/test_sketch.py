"""A projection of an input: its mean, and its variance by the formulas."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from sparsebp_cli.policy import Site, Step
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_shelf.policies.sketch import Sketch
from sparsebp_shelf.saver import SavedSketch

DRAWS = 2_000
Entries = Literal["rademacher", "gaussian"]


def save(policy: Sketch, x: Tensor, draw: int = 0) -> SavedSketch:
    saved = policy.save(x, Site("layer", 6, (len(x),)), Step(0, draw=draw))
    assert saved is not None
    return saved


def test_keep_1_trains_as_dense_bit_for_bit() -> None:
    assert equal(train_network(Sketch(keep=1.0)), train_network(None))


@pytest.mark.parametrize("entries", ["rademacher", "gaussian"])
def test_mean_and_variance_over_draws_are_those_of_the_formula(entries: Entries) -> None:
    """(|x|^2 |dy|^2 + |dW|^2) / K for normal entries; for +1 and -1, less 2 / K times the sum of |x_i|^2 |dy_i|^2."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(16, width, dtype=torch.float64, generator=generator) for width in (3, 4))
    dense, policy = grad.t() @ x, Sketch(keep=0.5, entries=entries)
    draws = [grad.t() @ save(policy, x, number).restore() for number in range(1, 2 * DRAWS + 1)]
    sizes = x.square().sum(1) * grad.square().sum(1)
    formula = float(x.square().sum() * grad.square().sum() + dense.square().sum()) / 8
    if entries == "rademacher":
        formula -= 2 * float(sizes.sum()) / 8
    error = sum(float((one - dense).square().sum()) for one in draws) / len(draws)
    assert error == pytest.approx(formula, rel=0.05)
    assert float((torch.stack(draws).mean(0) - dense).norm()) <= 4 * (error / len(draws)) ** 0.5


def test_the_matrix_is_drawn_again_and_not_stored() -> None:
    saved = save(Sketch(keep=0.25), torch.randn(32, 8))
    assert torch.equal(saved.draw(), saved.draw())
    assert [tuple(tensor.shape) for tensor in saved.tensors] == [(8, 8)]
