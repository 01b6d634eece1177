"""PUBLIC. Conformance suites for plugin authors: everything that a contract promises, in one line of a test.

from sparsebp_cli.testing import check_policy

def test_stride_keeps_the_contract():
    check_policy("stride", every=4)
"""

from sparsebp_cli.testing.policy import check_policy

__all__ = ["check_policy"]
