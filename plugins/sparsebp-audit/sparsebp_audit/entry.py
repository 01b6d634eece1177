"""Name the command of this package for its entry point."""

from sparsebp_cli.cli.plugin import VerbEntry

REPORT = "sparsebp_audit.report"
AUDIT = VerbEntry(
    "sparsebp_audit.verb.audit:audit",
    "Everyday",
    {"audit": (f"{REPORT}.report:AuditReport", None)},
    example="audit --steps 8 python train.py",
    described=tuple(f"{REPORT}.{name}" for name in ("report", "applied", "isolation")),
)
