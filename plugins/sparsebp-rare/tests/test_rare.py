import pytest
import torch
from sparsebp_rare import Rare

from sparsebp_cli.policy import Step, Tokens
from sparsebp_cli.testing import check_policy


@pytest.mark.parametrize(
    "options", [{}, {"keep": 0.5}, {"keep": 0.1, "within": "example"}, {"band": [0.2, 0.6], "mode": "detach"}], ids=str
)
def test_rare_keeps_the_contract(options: dict[str, object]) -> None:
    check_policy(Rare, **options)


def test_the_tokens_that_occur_once_are_trained_first() -> None:
    ids_BT = torch.tensor([[5, 5, 7, 5, 9, 5]])
    target_BT = torch.tensor([[True, True, True, True, True, False]])
    choice = Rare(keep=0.4).choose(Tokens(ids_BT, target_BT, torch.ones_like(target_BT)), Step(0))
    assert choice.trained_BT.nonzero()[:, 1].tolist() == [1, 3]  # they predict 7 and 9
