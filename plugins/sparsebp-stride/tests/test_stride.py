import pytest
import torch
from sparsebp_stride import Stride

from sparsebp_cli.policy import Rows, Site, Step
from sparsebp_cli.testing import check_policy


@pytest.mark.parametrize("every", [1, 2, 4, 10])
def test_stride_keeps_the_contract(every: int) -> None:
    check_policy(Stride, every=every)


def test_every_row_gets_its_turn() -> None:
    policy, grad_NO, site = Stride(every=3), torch.randn(8, 2), Site("layer", 2, (8,))
    selections = [policy.select(grad_NO, site, Step(index)) for index in range(3)]
    assert all(isinstance(selection, Rows) for selection in selections)
    rows = [row for selection in selections for row in selection.index_K.tolist()]
    assert sorted(rows) == list(range(8))
