"""PUBLIC. Conformance suites for plugin authors: one line of a test checks everything that a contract promises.

from sparsebp_cli.testing import check_policy, check_target

def test_stride_keeps_the_contract():
    check_policy("stride", every=4)

def test_my_cluster_keeps_the_contract():
    check_target("my-cluster", queue="short")

``FakeTarget`` is a target inside the test's own process. Tests can cut its connection and lose its workers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["FakeTarget", "check_policy", "check_target"]

if TYPE_CHECKING:
    from sparsebp_cli.testing.fake import FakeTarget
    from sparsebp_cli.testing.policy import check_policy
    from sparsebp_cli.testing.target import check_target
else:
    # Imported on first use, because only check_policy needs torch.
    _FILES = {"FakeTarget": "fake", "check_policy": "policy", "check_target": "target"}

    def __getattr__(name):
        if name in _FILES:
            return getattr(import_module(f"sparsebp_cli.testing.{_FILES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
