"""The result of an audit: findings, the work of each module, and both as text and HTML."""

from sparsebp_audit.report.applied import Applied, StepTimes
from sparsebp_audit.report.isolation import BatchJudgement, IsolationReport, LossJudgement, MixedPair
from sparsebp_audit.report.kind import BY_LOSSLESS, KINDS, LOSSLESS_ADVICE, LOSSLESS_REFUSED, FindingKind
from sparsebp_audit.report.page import render_page, write_page
from sparsebp_audit.report.report import SCHEMA, THRESHOLD, AuditReport, Finding, ModuleWork

__all__ = [
    "BY_LOSSLESS",
    "KINDS",
    "LOSSLESS_ADVICE",
    "LOSSLESS_REFUSED",
    "SCHEMA",
    "THRESHOLD",
    "Applied",
    "AuditReport",
    "BatchJudgement",
    "Finding",
    "FindingKind",
    "IsolationReport",
    "LossJudgement",
    "MixedPair",
    "ModuleWork",
    "StepTimes",
    "render_page",
    "write_page",
]
