import pytest
from sparsebp_product import Product

from sparsebp_cli.testing import check_policy


@pytest.mark.parametrize("keep", [0.1, 0.5, 1.0])
def test_product_keeps_the_contract(keep: float) -> None:
    check_policy(Product, keep=keep)
