"""PUBLIC. Conformance suites for plugin authors: everything that a contract promises, in one line of a test.

from sparsebp_cli.testing import check_policy, check_target

def test_stride_keeps_the_contract():
    check_policy("stride", every=4)

def test_my_cluster_keeps_the_contract():
    check_target("my-cluster", queue="short")

``FakeTarget`` is a target inside the test's own process, whose line can be cut and whose workers can be lost.
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
    _FILES = {"FakeTarget": "fake", "check_policy": "policy", "check_target": "target"}  # only one of them needs torch

    def __getattr__(name):
        if name in _FILES:
            return getattr(import_module(f"sparsebp_cli.testing.{_FILES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
