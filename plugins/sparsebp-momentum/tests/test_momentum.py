import pytest
from sparsebp_momentum import Momentum

from sparsebp_cli.testing import check_policy


@pytest.mark.parametrize("keep", [0.1, 0.5, 1.0])
def test_momentum_keeps_the_contract(keep: float) -> None:
    check_policy(Momentum, keep=keep)
