"""Representatives of rows: which one stands for which row, by how much, and what the weight's gradient is then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops, saved_bytes
from sparsebp_cli.policy import Site, Step, make_policies
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_shelf.policies.pamm import PAMM
from sparsebp_shelf.policies.wta_crs import WTACRS
from sparsebp_shelf.saver import SavedRepresentatives

X = torch.tensor([[2.0, 0.0], [0.0, 3.0], [4.0, 0.0], [0.0, -6.0], [1.0, 1.0], [0.0, 0.0], [-3.0, 1.0]])


def represent(x: Tensor, index: list[int], epsilon: float | None = None) -> SavedRepresentatives:
    return SavedRepresentatives.of(x, torch.tensor(index), epsilon)


def by_definition(x: Tensor, index: list[int], epsilon: float | None) -> Tensor:
    """Return the restored rows, each found on its own."""
    rows, near = [], []
    for row in x:
        candidates = [x[number] for number in index]
        cosines = [abs(float(row @ c) / (float(row.norm() * c.norm()) or 1.0)) for c in candidates]
        chosen = candidates[cosines.index(max(cosines))]
        projection = chosen * (row @ chosen / (chosen @ chosen)) if chosen.any() else chosen
        is_near = epsilon is None or float((row - projection).norm()) <= epsilon * float(row.norm()) + 1e-4
        near.append(is_near)
        rows.append(projection if is_near else torch.zeros_like(row))
    factor = 1.0 if epsilon is None else len(x) / max(1, sum(near))
    return torch.stack(rows) * factor


def test_keep_1_trains_as_dense_bit_for_bit() -> None:
    assert equal(train_network(PAMM(keep=1.0)), train_network(None))


def test_a_row_is_its_projection_on_the_nearest_direction_also_on_an_opposite_one() -> None:
    saved = represent(X, [0, 1])
    assert saved.index_N[:4].tolist() == [0, 1, 0, 1]
    assert saved.factor_N.tolist() == [1.0, 1.0, 2.0, -2.0, 0.5, 0.0, -1.5]  # the fifth is as near to both
    restored = torch.tensor([[2.0, 0.0], [0.0, 3.0], [4.0, 0.0], [0.0, -6.0], [1.0, 0.0], [0.0, 0.0], [-3.0, 0.0]])
    assert torch.equal(saved.restore(), restored)


@pytest.mark.parametrize("epsilon", [None, 0.0, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_representatives_and_factors_are_those_of_the_definition(epsilon: float | None, seed: int) -> None:
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    index = [3, 7, 1, 20]
    torch.testing.assert_close(
        represent(x, index, epsilon).restore(), by_definition(x, index, epsilon), rtol=1e-9, atol=1e-9
    )


def test_all_rows_as_representatives_restore_the_input() -> None:
    x = torch.randn(12, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(represent(x, list(range(12))).restore(), x, rtol=1e-12, atol=1e-12)


def test_rows_that_are_left_out_are_made_up_for_by_the_others() -> None:
    saved = represent(X, [0, 1], 0.5)  # the fifth is at 45 degrees: 0.71 of its length from its projection
    assert saved.factor_N.tolist() == pytest.approx([7 / 6, 7 / 6, 14 / 6, -14 / 6, 0.0, 0.0, -1.5 * 7 / 6])


def test_the_gradient_of_the_weight_is_that_of_the_restored_input_others_are_dense() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 5).double(), torch.randn(4, 16, 6, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(4, 16, 5, dtype=torch.float64)
    policy = PAMM(keep=0.25)
    with sbp.attach(layer, policy, seed=3) as engine:
        engine.backward((layer(x) * factor).sum())
    saved = policy.save(x.detach().reshape(64, 6), Site("", 5, (4, 16)), Step(0, seed=3))
    assert saved is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    torch.testing.assert_close(layer.weight.grad, factor.reshape(64, 5).t() @ saved.restore(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.bias.grad, factor.sum((0, 1)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, factor @ layer.weight.detach(), rtol=1e-12, atol=1e-12)


def test_bytes_and_multiplications_are_those_claimed() -> None:
    layer, x = nn.Linear(64, 32), torch.randn(256, 64)
    with sbp.attach(layer, PAMM(keep=1 / 16)) as engine:
        with saved_bytes(layer.parameters()) as stored:
            loss = layer(x).sum()
        with count_flops() as count:
            engine.backward(loss)
        claim = engine.claim()
    assert stored.total == 16 * 64 * 4 + 256 * (4 + 4)
    assert count.total == claim.claimed_flops == claim.dense_flops / 16


def test_the_control_keeps_as_many_rows_drawn_uniformly() -> None:
    policy = PAMM(keep=0.25, where=["*q_proj"])
    assert policy.control is not None
    (control,) = make_policies(policy.control)
    assert isinstance(control, WTACRS)
    assert (control.by, control.budget, control.where) == ("uniform", 0.25, ["*q_proj"])
