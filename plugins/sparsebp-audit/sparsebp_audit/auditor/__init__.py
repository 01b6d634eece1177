"""Watch a training loop and build the audit's report."""

from sparsebp_audit.auditor.library import Audit, audit

__all__ = ["Audit", "audit"]
