"""PUBLIC. The contract between policies and the engine, and how policies are found. All that a plugin imports."""

from sparsebp_cli.policy.contract import BackwardShare, GradientSelector, Policy, Site, Step
from sparsebp_cli.policy.discovery import FoundPolicy, find_policies, make_policy
from sparsebp_cli.policy.selection import Columns, Elements, Rows, Selection

__all__ = [
    "BackwardShare",
    "Columns",
    "Elements",
    "FoundPolicy",
    "GradientSelector",
    "Policy",
    "Rows",
    "Selection",
    "Site",
    "Step",
    "find_policies",
    "make_policy",
]
