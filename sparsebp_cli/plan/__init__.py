"""The plan of a run: the resolved recipe, its content hash, and the arithmetic of ceilings."""

from sparsebp_cli.plan.cost import ceiling, realised_share
from sparsebp_cli.plan.plan import Plan, content_hash
from sparsebp_cli.plan.provenance import Provenance, find_provenance
from sparsebp_cli.plan.resolve import make_plan

__all__ = ["Plan", "Provenance", "ceiling", "content_hash", "find_provenance", "make_plan", "realised_share"]
