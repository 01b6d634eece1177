"""The plan of a run: the resolved recipe, its content hash, and the arithmetic of speed-up limits."""

from sparsebp_cli.plan.plan import Plan, content_hash, make_plan
from sparsebp_cli.plan.provenance import LedgerMark, Provenance, find_provenance
from sparsebp_cli.plan.speedup import reached_share, speedup_limit

__all__ = [
    "LedgerMark",
    "Plan",
    "Provenance",
    "content_hash",
    "find_provenance",
    "make_plan",
    "reached_share",
    "speedup_limit",
]
