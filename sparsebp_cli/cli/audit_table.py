"""An audit as tables of at most 100 columns."""

from __future__ import annotations

from rich.padding import Padding
from rich.text import Text

from sparsebp_cli.audit_report import Applied, AuditReport, Finding, IsolationReport
from sparsebp_cli.audit_report.page import BOUND, COLUMNS, count, rows, summary, where
from sparsebp_cli.cli.screen import console, make_table, print_line

NUMBERS = ("FLOP", "of step", "bytes", "of memory")
MOST_MODULES = 24  # groups in the table; JSON and the page have all of them


def print_audit(report: AuditReport) -> None:
    """Print a summary, the judgement of examples, the findings with advice, the notes, and the work by module."""
    for line in summary(report):
        print_line(line)
    if report.examples is not None:
        _print_examples(report.examples)
    if report.findings:
        table = make_table("waste", *NUMBERS, numbers=NUMBERS)
        for finding in report.findings:
            table.add_row(finding.title, *_cells(finding))
        console().print(table)
        for finding in report.findings:
            _print_finding(finding)
    for note in report.notes:
        console().print(f"note: {note}")
    cells = rows(report)
    used = [place for place in range(len(COLUMNS)) if any(row[place] for row in cells)]
    table = make_table(*(COLUMNS[place] for place in used), numbers=COLUMNS[1:])
    for row in cells[:MOST_MODULES]:
        table.add_row(*(row[place] for place in used))
    console().print(table)
    if len(cells) > MOST_MODULES:
        print_line(f"and {len(cells) - MOST_MODULES} more")
    if report.findings:
        console().print(BOUND)
    if report.applied is not None:
        _print_applied(report.applied)
    if report.num_below:
        print_line(f"{report.num_below} more below {100 * report.threshold:g} % of a step")
    print_line(report.verdict)


def _print_applied(applied: Applied) -> None:
    headline, *others = applied.lines()
    console().print(Text.assemble(("lossless", "bold"), f" {headline}"))
    for line in others:
        console().print(f"  {line}")


def _print_examples(examples: IsolationReport) -> None:
    out = console()
    out.print(Text.assemble(("examples", "bold"), f": {examples.headline}"))
    for headline, sentences in examples.lines():
        out.print(Padding(headline, (0, 0, 0, 2), expand=False))
        for sentence in sentences:
            out.print(Padding(sentence, (0, 0, 0, 4), expand=False))


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


def _print_finding(finding: Finding) -> None:
    """Print what was found and what to do, wrapped, for people only."""
    named = where(finding.modules)
    hint = "" if finding.exact else " (not exactly: what is used would change)"
    out = console()
    out.print(Text.assemble((finding.title, "bold"), f": {finding.detail}{hint}"))
    if named:
        out.print(f"  where: {named}")
    out.print(f"  to do: {finding.advice}")
