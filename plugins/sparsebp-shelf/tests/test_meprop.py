"""meProp: the largest entries of each row, or the same features for all rows; the bias gets the whole gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops
from sparsebp_cli.policy import Columns, Elements, Seen, Site, Step, make_policies
from sparsebp_cli.testing import check_policy
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_shelf.policies.meprop import MeProp

GRAD = torch.tensor([[1.0, -5.0, 2.0, 0.0], [4.0, 3.0, -1.0, 0.5], [-2.0, 0.1, 2.5, 0.2]])


def choose(policy: MeProp, grad: Tensor, draw: int = 0) -> Any:
    split = policy.choose(Seen(grad), Site("layer", grad.shape[1], (len(grad),)), Step(0, draw=draw))
    assert split is not None
    assert split.dgrad is split.wgrad
    assert split.full_bias
    return split.dgrad


@pytest.mark.parametrize("unified", [False, True])
def test_k_equal_to_all_features_trains_as_dense_bit_for_bit(unified: bool) -> None:
    assert equal(train_network(MeProp(keep=1.0, unified=unified)), train_network(None))


def test_each_row_keeps_its_own_largest_entries() -> None:
    kept = choose(MeProp(keep=0.5), GRAD)
    assert isinstance(kept, Elements)
    expected = torch.tensor([[0.0, -5.0, 2.0, 0.0], [4.0, 3.0, 0.0, 0.0], [-2.0, 0.0, 2.5, 0.0]])
    assert torch.equal(kept.apply(GRAD), expected)


def test_the_unified_form_keeps_the_features_of_largest_sum_of_magnitudes() -> None:
    kept = choose(MeProp(keep=0.5, unified=True), GRAD)
    assert isinstance(kept, Columns)
    assert sorted(kept.index_K.tolist()) == [0, 1]  # sums 7, 8.1, 5.5, 0.7; by 2-norms as well, so:
    spread = torch.tensor([[3.0, 2.0, 0.0], [0.0, 2.0, 0.0]])  # sums 3, 4; 2-norms 3, 2.83
    assert choose(MeProp(keep=0.34, unified=True), spread).index_K.tolist() == [1]


@pytest.mark.parametrize("unified", [False, True])
def test_the_gradients_are_those_of_autograd_on_the_masked_gradient_but_for_the_bias(unified: bool) -> None:
    torch.manual_seed(0)
    policy = MeProp(keep=0.25, unified=unified)
    layer, x = nn.Linear(6, 8).double(), torch.randn(20, 6, requires_grad=True, dtype=torch.float64)
    factor = torch.randn(20, 8, dtype=torch.float64)
    with sbp.attach(layer, policy) as engine:
        engine.backward((layer(x) * factor).sum())
    masked = choose(policy, factor).apply(factor)
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    torch.testing.assert_close(layer.weight.grad, masked.t() @ x.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, masked @ layer.weight.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.bias.grad, factor.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("unified", [False, True])
def test_what_is_executed_is_what_is_claimed(unified: bool) -> None:
    layer, x = nn.Linear(16, 32), torch.randn(64, 16, requires_grad=True)
    with sbp.attach(layer, MeProp(keep=0.25, unified=unified)) as engine:
        loss = layer(x).square().sum()
        with count_flops() as count:
            engine.backward(loss)
        claim = engine.claim()
    left = 0.25 if unified else 1.0  # single entries are a dense product with zeros, unless few are kept
    assert count.total == claim.claimed_flops == left * claim.dense_flops


@pytest.mark.parametrize("unified", [False, True])
def test_the_control_draws_as_many_uniformly(unified: bool) -> None:
    policy = MeProp(keep=0.5, unified=unified, layers=[0])
    assert policy.control is not None
    (control,) = make_policies(policy.control)
    assert isinstance(control, MeProp)
    assert (control.by, control.budget, control.layers, control.control) == ("random", policy.budget, [0], None)
    kept = {tuple(choose(control, GRAD, draw).apply(GRAD.abs() + 1).ne(0).flatten().tolist()) for draw in range(40)}
    assert len(kept) > 3
    check_policy(control)
