"""The report of an audit as one HTML page without a script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparsebp_cli.audit_report.grid import COLUMNS, count, rows, summary, where
from sparsebp_cli.audit_report.report import AuditReport, Finding
from sparsebp_cli.page import check_path, render

BOUND = (
    "Savings are upper bounds by FLOPs and bytes: what a machine gains depends on its kernels. What one finding "
    "counts, no other counts again. Bytes that are saved are those of one backward pass."
)


def write_page(report: AuditReport, path: Path, command: str = "") -> Path:
    """Write the report of an audit as one HTML page to an ``.html`` file, which is replaced, and return its path.
    ``command`` is the one that was audited; empty leaves it out. Raise UsageError for another ending, or if the folder
    does not exist."""
    check_path(path)
    path.write_text(render_page(report, command), encoding="utf-8")
    return path


def render_page(report: AuditReport, command: str = "") -> str:
    """Return the report as HTML; an empty command, which is the audited one, is left out."""
    notes = list(report.notes)
    if report.num_below:
        notes.append(f"{report.num_below} more below {100 * report.threshold:g} % of a step")
    cells = rows(report)
    used = [place for place in range(len(COLUMNS)) if any(row[place] for row in cells)]
    return render(
        __package__,
        "page.html",
        report=report,
        command=command,
        summary=summary(report),
        cards=[_make_card(finding) for finding in report.findings],
        notes=notes,
        columns=[COLUMNS[place] for place in used],
        rows=[[row[place] for place in used] for row in cells],
        bound=BOUND,
    )


@dataclass(frozen=True)
class _Card:
    """One finding as the page shows it."""

    finding: Finding
    share: str
    width: str
    numbers: str
    where: str


def _make_card(finding: Finding) -> _Card:
    numbers = [f"{count(finding.flops, 'FLOP')} ({finding.flops_share:.1%})"] if finding.flops else []
    numbers += [f"{count(finding.saved_bytes, 'B')} ({finding.bytes_share:.1%})"] if finding.saved_bytes >= 0.5 else []
    numbers += [f"{finding.seconds_share:.1%} of the time under the audit"] if finding.seconds else []
    return _Card(
        finding,
        share=f"{finding.share:.1%}",
        width=f"{min(100.0, 100 * finding.share):.2f}%",
        numbers=", ".join(numbers),
        where=where(finding.modules, 6),
    )
