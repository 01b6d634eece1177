"""One number for each group of features: the projection on the mean direction, by its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebp_cli.policies.velora import VeLoRA
from sparsebp_cli.policy import SavedDirection, Site, Step, make_policies
from sparsebp_cli.testing.promise import equal, train_network


def save(policy: VeLoRA, x: Tensor, index: int = 0) -> SavedDirection:
    saved = policy.save(x, Site("layer", 6, (len(x),)), Step(index))
    assert saved is not None
    return saved


def test_groups_of_one_train_as_dense_bit_for_bit() -> None:
    assert equal(train_network(VeLoRA(group=1)), train_network(None))


def test_each_group_becomes_its_projection_on_the_mean_of_all() -> None:
    x = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups = x.view(5, 3, 4)
    direction = groups.mean((0, 1)) / groups.mean((0, 1)).norm()
    saved = save(VeLoRA(group=4), x)
    torch.testing.assert_close(saved.restore(), ((groups @ direction)[..., None] * direction).view(5, 12))
    assert [tuple(tensor.shape) for tensor in saved.tensors] == [(5, 3), (4,)]
    grad = torch.randn(5, 2, dtype=torch.float64)
    of_groups = grad.t() @ (groups @ direction)  # what is multiplied: G columns in place of D
    torch.testing.assert_close(grad.t() @ saved.restore(), (of_groups[..., None] * direction).view(2, 12))


def test_groups_that_point_in_one_direction_are_kept_as_they_are() -> None:
    direction, factors = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([[1.0, 3.0], [2.0, 0.5], [4.0, 1.0]])
    x = (factors[..., None] * direction).view(3, 6)
    torch.testing.assert_close(save(VeLoRA(group=3), x).restore(), x)


def test_features_that_fill_no_group_are_cut_off_again_and_zeros_stay_zero() -> None:
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    saved = save(VeLoRA(group=3), x)
    assert [tuple(tensor.shape) for tensor in saved.tensors] == [(4, 2), (4,)]  # two groups of four, of seven features
    assert saved.restore().shape == x.shape
    assert torch.equal(save(VeLoRA(group=3), torch.zeros(4, 7)).restore(), torch.zeros(4, 7))


def test_the_control_draws_the_direction() -> None:
    control = VeLoRA(group=4).control
    assert control is not None
    (policy,) = make_policies(control)
    assert isinstance(policy, VeLoRA)
    drawn = [save(policy, torch.randn(5, 12), index).direction_C for index in range(2)]
    assert not torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(torch.stack(drawn).norm(dim=1), torch.ones(2))
    assert policy.control is None
