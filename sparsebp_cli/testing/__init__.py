"""PUBLIC. Conformance suites for plugin authors: one line of a test checks everything that a contract promises.

from sparsebp_cli.testing import check_kind, check_policy, check_target, check_tracker

def test_stride_keeps_the_contract():
    check_policy("stride", every=4)

def test_depth_keeps_what_every_kind_promises():
    check_kind(DEPTH_SELECTOR, [RandomDepth(full=0.3), RandomDepth(full=1.0)])

def test_my_cluster_keeps_the_contract():
    check_target("my-cluster", queue="short")

def test_my_tracker_keeps_the_contract():
    check_tracker("my-tracker", read_what_it_stored)

``FakeTarget`` is a target inside the test's own process. Tests can cut its connection and lose its workers. In the
suite of a kind of your own, ``check_repeatable`` and ``check_draws`` check what every kind promises of its decisions,
and ``check_state`` what every policy with a state does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "FakeTarget",
    "check_draws",
    "check_kind",
    "check_policy",
    "check_repeatable",
    "check_state",
    "check_target",
    "check_tracker",
    "enough",
    "name_of",
    "require",
]

if TYPE_CHECKING:
    from sparsebp_cli.testing.fake import FakeTarget
    from sparsebp_cli.testing.kind import check_kind
    from sparsebp_cli.testing.policy import check_policy
    from sparsebp_cli.testing.promise import enough, name_of, require
    from sparsebp_cli.testing.state import check_state
    from sparsebp_cli.testing.suite import check_draws, check_repeatable
    from sparsebp_cli.testing.target import check_target
    from sparsebp_cli.testing.tracker import check_tracker
else:
    # Imported on first use, because those for targets need no torch.
    _FILES = {
        "FakeTarget": "fake",
        "check_draws": "suite",
        "check_kind": "kind",
        "check_policy": "policy",
        "check_repeatable": "suite",
        "check_state": "state",
        "check_target": "target",
        "check_tracker": "tracker",
        "enough": "promise",
        "name_of": "promise",
        "require": "promise",
    }

    def __getattr__(name):
        if name in _FILES:
            return getattr(import_module(f"sparsebp_cli.testing.{_FILES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
