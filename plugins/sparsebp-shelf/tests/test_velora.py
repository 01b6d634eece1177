"""One number for each group of features: the projection on the mean direction, by its definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import saved_bytes
from sparsebp_cli.policy import Site, Step, make_policies
from sparsebp_cli.policy.composition import PolicyFacts
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_shelf.policies.velora import VeLoRA
from sparsebp_shelf.saver import SavedDirection


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


# Two groups of two features. The groups of the first input point along (3, 4) in the mean, so v = (0.6, 0.8). A group
# (5, 0) of a later one then becomes 3 v, and (0, 5) becomes 4 v. By their own mean v would be (1, 1) / root(2).
FIRST = torch.tensor([[2.0, 4.0, 4.0, 4.0]], dtype=torch.float64)
LATER, RESTORED = torch.tensor([[5.0, 0.0, 0.0, 5.0]]), torch.tensor([[1.8, 2.4, 2.4, 3.2]])


def attach(layer: nn.Module, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    return sbp.attach(layer, VeLoRA(group=2, **options), optimizer=optimizer), optimizer


def gradient(layer: nn.Linear, attached: tuple[Any, torch.optim.Optimizer], x: Tensor) -> Tensor:
    """Make a step and return the gradient of the weight, which is that of its only output."""
    engine, optimizer = attached
    optimizer.zero_grad()
    engine.backward(layer(x.to(layer.weight.dtype)).sum())
    found = layer.weight.grad
    assert found is not None
    optimizer.step()
    return found.clone()


def test_the_direction_of_the_first_batch_stays() -> None:
    layer = nn.Linear(4, 1, bias=False).double()
    attached = attach(layer)
    torch.testing.assert_close(gradient(layer, attached, FIRST), torch.tensor([[2.64, 3.52, 3.36, 4.48]]).double())
    for _ in range(2):
        torch.testing.assert_close(gradient(layer, attached, LATER), RESTORED.double())


def test_a_direction_survives_a_resume_and_a_probe_before_it_is_known() -> None:
    layer = nn.Linear(4, 1, bias=False).double()
    engine, _ = attached = attach(layer)
    with engine.probing():
        engine.backward(layer(LATER.double()).sum())
    gradient(layer, attached, FIRST)
    state = engine.state_dict()
    engine.detach()
    resumed = attach(layer)
    resumed[0].load_state_dict(state)
    torch.testing.assert_close(gradient(layer, resumed, LATER), RESTORED.double())


def test_of_several_micro_batches_the_first_gives_the_direction() -> None:
    layer = nn.Linear(4, 1, bias=False).double()
    engine, optimizer = attached = attach(layer)
    engine.backward(layer(FIRST).sum())
    before = layer.weight.grad.clone()  # type: ignore[union-attr]
    engine.backward(layer(LATER.double()).sum())  # by its own mean: 5 / root(2) along (1, 1) over root(2), twice
    torch.testing.assert_close(layer.weight.grad - before, torch.full((1, 4), 2.5).double())  # type: ignore[operator]
    optimizer.step()
    torch.testing.assert_close(gradient(layer, attached, LATER), RESTORED.double())


def test_an_input_keeps_as_many_bytes_as_it_claims_before_and_after_the_first_step() -> None:
    layer, x = nn.Linear(64, 8), torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    policy, claimed = VeLoRA(group=8), (32 * 8 + 8) * 4
    assert policy.count_bytes(32, 64, 4) == claimed
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    engine = sbp.attach(layer, policy, optimizer=optimizer)
    for _ in range(2):
        with saved_bytes(layer.parameters()) as saved:
            output = layer(x)
        assert saved.total == claimed
        engine.backward(output.sum())
        optimizer.step()


def test_only_a_direction_that_stays_needs_one_process() -> None:
    assert PolicyFacts.of(VeLoRA()).facts["observes"]
    assert not PolicyFacts.of(VeLoRA(by="mean")).facts["observes"]
