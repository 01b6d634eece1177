"""PUBLIC. Conformance suites for plug-in authors: one line of a test checks everything that a contract promises.

from sparsebp_cli.testing import check_kind, check_policy, check_target

def test_stride_keeps_the_contract():
    check_policy("stride", every=4)

def test_depth_keeps_what_every_kind_promises():
    check_kind(DEPTH_SELECTOR, [RandomDepth(full=0.3), RandomDepth(full=1.0)])

def test_my_cluster_keeps_the_contract():
    check_target("my-cluster", queue="short")

If you write a suite for a new kind, call ``check_repeatable`` and ``check_draws``, which check the promises of all
kinds about decisions. Call ``check_state`` for policies with a state.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "check_draws",
    "check_kind",
    "check_policy",
    "check_repeatable",
    "check_state",
    "check_target",
    "enough",
    "equal",
    "find_share",
    "first_state",
    "name_of",
    "require",
    "through_json",
    "train_network",
    "vary",
]

if TYPE_CHECKING:
    from sparsebp_cli.testing.kind import check_kind
    from sparsebp_cli.testing.policy import check_policy
    from sparsebp_cli.testing.promise import enough, equal, name_of, require, through_json, train_network, vary
    from sparsebp_cli.testing.state import check_state, first_state
    from sparsebp_cli.testing.suite import check_draws, check_repeatable, find_share
    from sparsebp_cli.testing.target import check_target
else:
    # Imported on first use, because the suites for targets need no torch.
    _FILES = {
        "check_draws": "suite",
        "check_kind": "kind",
        "check_policy": "policy",
        "check_repeatable": "suite",
        "check_state": "state",
        "check_target": "target",
        "enough": "promise",
        "equal": "promise",
        "find_share": "suite",
        "first_state": "state",
        "name_of": "promise",
        "require": "promise",
        "through_json": "promise",
        "train_network": "promise",
        "vary": "promise",
    }

    def __getattr__(name):
        if name in _FILES:
            return getattr(import_module(f"sparsebp_cli.testing.{_FILES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
