"""PUBLIC. The contract between policies and the engine, and how policies are found. All that a plugin imports."""

from sparsebp_cli.policy import choice
from sparsebp_cli.policy.contract import GradientSelector, Policy, Site, Step
from sparsebp_cli.policy.discovery import FoundPolicy, find_policies, make_policy
from sparsebp_cli.policy.router import Edge, EdgeRouter
from sparsebp_cli.policy.selection import Blocks, Columns, Elements, Rows, Selection, TwoToFour

__all__ = [
    "Blocks",
    "Columns",
    "Edge",
    "EdgeRouter",
    "Elements",
    "FoundPolicy",
    "GradientSelector",
    "Policy",
    "Rows",
    "Selection",
    "Site",
    "Step",
    "TwoToFour",
    "choice",
    "find_policies",
    "make_policy",
]
