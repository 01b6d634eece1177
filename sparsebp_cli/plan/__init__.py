"""The plan of a run: the resolved recipe, its content hash, and the arithmetic of ceilings."""

from sparsebp_cli.plan.plan import Plan, content_hash, make_plan
from sparsebp_cli.plan.provenance import LedgerMark, Provenance, find_provenance
from sparsebp_cli.plan.selection_gain import ceiling, realised_share

__all__ = [
    "LedgerMark",
    "Plan",
    "Provenance",
    "ceiling",
    "content_hash",
    "find_provenance",
    "make_plan",
    "realised_share",
]
