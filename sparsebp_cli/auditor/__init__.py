"""PUBLIC. Audits any training of this process: what its backward passes execute and store, and how much of it is
wasted.
"""

from sparsebp_cli.auditor.library import Audit, audit

__all__ = ["Audit", "audit"]
