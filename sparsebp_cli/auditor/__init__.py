"""PUBLIC. What a backward pass really executes and keeps, and what of it is wasted: on any training of this process."""

from sparsebp_cli.auditor.library import Audit, audit

__all__ = ["Audit", "audit"]
