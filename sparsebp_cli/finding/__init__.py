"""What an audit found: findings, the work of each module, and the forms in which they are given."""

from sparsebp_cli.finding.kind import KINDS, Kind
from sparsebp_cli.finding.page import render_page, write_page
from sparsebp_cli.finding.report import SCHEMA, THRESHOLD, AuditReport, Finding, ModuleWork

__all__ = [
    "KINDS",
    "SCHEMA",
    "THRESHOLD",
    "AuditReport",
    "Finding",
    "Kind",
    "ModuleWork",
    "render_page",
    "write_page",
]
