"""Show an audit on one screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from sparsebp_audit.report import AuditReport, Finding
from sparsebp_audit.report.page import count, summary, where
from sparsebp_cli.cli.screen import make_table, print_screenful

if TYPE_CHECKING:
    from rich.console import RenderableType

NUMBERS = ("FLOP", "of step", "bytes", "of memory")
MOST_FINDINGS = 6  # in the table; JSON and the page have all of them, and the work of each module
REST = "more: --html FILE or -o json (every finding and module)"


def print_audit(report: AuditReport) -> None:
    """Print the verdict, a summary and the largest findings; then as many details and advice as fit."""
    lines = [report.verdict, *summary(report)]
    lines += [] if report.applied is None else [f"lossless {report.applied.headline}"]
    lines += [] if report.examples is None else [f"examples: {report.examples.headline}"]
    head: list[RenderableType] = [Text(line) for line in lines]
    if report.findings:
        table = make_table("waste", *NUMBERS, numbers=NUMBERS)
        for finding in report.findings[:MOST_FINDINGS]:
            table.add_row(finding.title, *_cells(finding))
        head.append(table)
    print_screenful(head, list(_find_notes(report)), REST)


def _find_notes(report: AuditReport) -> Iterator[str]:
    if report.examples is not None:
        for headline, sentences in report.examples.lines():
            yield "\n    ".join([f"  {headline}", *sentences])
    for finding in report.findings:
        yield _describe(finding)
    yield from (f"note: {note}" for note in report.notes)
    if report.applied is not None:
        yield from (f"  {line}" for line in report.applied.lines()[1:])
    if report.num_below:
        yield f"{report.num_below} more below {100 * report.threshold:g} % of a step"


def _cells(finding: Finding) -> tuple[str, ...]:
    share = f"{finding.flops_share:.1%}" if finding.flops else ""
    if finding.seconds:
        share = f"{finding.seconds_share:.1%} time"
    return (
        count(finding.flops) if finding.flops else "",
        share,
        count(finding.saved_bytes, "B") if finding.saved_bytes >= 0.5 else "",
        f"{finding.bytes_share:.1%}" if finding.saved_bytes >= 0.5 else "",
    )


def _describe(finding: Finding) -> str:
    """Return a sentence with the finding, its place, and the remedy."""
    named = where(finding.modules)
    hint = "" if finding.exact else " (without this work, results would change)"
    place = f"\n  where: {named}" if named else ""
    return f"{finding.title}: {finding.detail}{hint}{place}\n  to do: {finding.advice}"
