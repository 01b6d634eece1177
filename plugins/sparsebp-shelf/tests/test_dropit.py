"""The largest entries of an input stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebp_cli.policy import Site, Step, make_policies
from sparsebp_cli.testing.promise import equal, train_network
from sparsebp_shelf.policies.dropit import DropIT, find_largest
from sparsebp_shelf.saver import SavedElements


def save(policy: DropIT, x: Tensor, index: int = 0) -> SavedElements:
    saved = policy.save(x, Site("layer", 6, (1, len(x))), Step(index))
    assert saved is not None
    return saved


def test_keep_1_trains_as_dense_bit_for_bit() -> None:
    assert equal(train_network(DropIT(keep=1.0)), train_network(None))


@pytest.mark.parametrize(("keep", "kept"), [(0.2, [5.0]), (0.4, [-4.0, 5.0]), (0.6, [3.0, -4.0, 5.0])])
def test_the_largest_entries_stay_as_many_as_the_share_says(keep: float, kept: list[float]) -> None:
    """One of five at a share of a fifth; the published code of Back Razor keeps two."""
    assert save(DropIT(keep=keep), torch.tensor([[1.0, -2, 3, -4, 5]])).value_K.tolist() == kept


def test_the_gradient_is_that_of_the_masked_input_and_the_control_keeps_as_many() -> None:
    x, grad = torch.randn(16, 8), torch.randn(16, 3)
    mask = x.abs() >= x.abs().flatten().topk(26).values[-1]
    torch.testing.assert_close(grad.t() @ save(DropIT(), x).restore(), grad.t() @ (x * mask))
    control = DropIT().control
    assert control is not None
    (policy,) = make_policies(control)
    assert isinstance(policy, DropIT)
    drawn = [save(policy, x, index) for index in range(2)]
    assert [len(saved.value_K) for saved in drawn] == [26, 26]
    assert not torch.equal(drawn[0].index_K, drawn[1].index_K)
    assert policy.control is None


def test_within_examples_each_keeps_its_own_largest_as_back_razor_says() -> None:
    x = torch.tensor([[1.0, 9], [8, 7], [0.1, -0.4], [0.3, 0.2]])  # two examples of two rows
    policy = DropIT(keep=0.5, within="example")
    saved = policy.save(x, Site("layer", 6, (2, 2)), Step(0))
    assert saved is not None
    assert saved.value_K.tolist() == pytest.approx([9.0, 8.0, -0.4, 0.3])
    assert save(DropIT(keep=0.5), x).value_K.tolist() == pytest.approx([1.0, 9.0, 8.0, 7.0])


@pytest.mark.parametrize("kept", [1, 2, 3, 5, 8])
def test_as_many_stay_as_the_share_says_where_examples_do_not_divide_it(kept: int) -> None:
    score = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    index = find_largest(score, kept)
    assert len(index) == kept
    assert index.tolist() == sorted(set(index.tolist()))
    for example in range(3):
        own = [number - 4 * example for number in index.tolist() if number // 4 == example]
        assert len(own) == kept // 3 + (example < kept % 3)
        assert sorted(own) == sorted(score[example].topk(len(own)).indices.tolist())
