"""The result of an audit: findings, the work of each module, and their rendering as text and HTML."""

from sparsebp_cli.audit_report.kind import KINDS, Kind
from sparsebp_cli.audit_report.page import render_page, write_page
from sparsebp_cli.audit_report.report import SCHEMA, THRESHOLD, AuditReport, Finding, ModuleWork

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
