"""The report of an audit as one page of HTML: style inside, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path

from sparsebp_cli.errors import UsageError
from sparsebp_cli.finding.grid import COLUMNS, count, rows, summary, where
from sparsebp_cli.finding.report import AuditReport, Finding

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
BOUND = (
    "Savings are upper bounds by FLOPs and bytes: what a machine gains depends on its kernels. What one finding "
    "counts, no other counts again. Bytes that are saved are those of one backward pass."
)


def check_path(path: Path) -> None:
    """Refuse a path that no report can be written to.

    Args:
        path: Where to.

    Raises:
        UsageError: The ending is not ``.html``, or the folder does not exist.
    """
    if path.suffix.lower() not in {".html", ".htm"}:
        raise UsageError(f"a report's name must end in .html, got {path.name!r}")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r} for the report")


def write_page(report: AuditReport, path: Path, command: str = "") -> Path:
    """Write the report.

    Args:
        report: Of an audit.
        path: Where to; ``.html``. It is replaced.
        command: That was audited; empty leaves it out.

    Returns:
        The path.

    Raises:
        UsageError: The ending is another one, or the folder does not exist.
    """
    check_path(path)
    path.write_text(render_page(report, command), encoding="utf-8")
    return path


def render_page(report: AuditReport, command: str = "") -> str:
    """Return the report as HTML.

    Args:
        report: Of an audit.
        command: That was audited; empty leaves it out.

    Returns:
        One page.
    """
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    lines = "".join(f"<p>{escape(line)}.</p>" for line in summary(report))
    asked = f"<p><code>{escape(command)}</code></p>" if command else ""
    cards = "".join(_card(finding) for finding in report.findings)
    parts = [
        f"<header><p class=kicker>SparseBP audit</p><h1>{escape(report.verdict)}</h1>{asked}{lines}</header>",
        f'<section><h2>What is wasted</h2><div class="cards">{cards}</div></section>' if cards else "",
        _notes(report),
        _modules(report),
        f"<p class=note>{escape(BOUND)}</p>",
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(report.verdict)}</title><style>{style}</style></head><body><main>",
            *(part for part in parts if part),
            "</main></body></html>\n",
        ]
    )


def _card(finding: Finding) -> str:
    numbers = [f"{count(finding.flops, 'FLOP')} ({finding.flops_share:.1%})"] if finding.flops else []
    numbers += [f"{count(finding.saved_bytes, 'B')} ({finding.bytes_share:.1%})"] if finding.saved_bytes >= 0.5 else []
    numbers += [f"{finding.seconds_share:.1%} of the time under the audit"] if finding.seconds else []
    share = min(100.0, 100 * finding.share)
    hint = "" if finding.exact else " Not exactly: what is used would change."
    named = where(finding.modules, 6)
    place = f"<p class=where>{escape(named)}</p>" if named else ""
    return (
        f"<article><h3>{escape(finding.title)}</h3>"
        f'<div class="bar" role="img" aria-label="{finding.share:.1%} of a step">'
        f'<b style="width:{share:.2f}%"></b></div>'
        f"<p class=n>{escape(', '.join(numbers))}</p><p>{escape(finding.detail)}.</p>"
        f"<p><strong>To do:</strong> {escape(finding.advice)}.{hint}</p>{place}</article>"
    )


def _notes(report: AuditReport) -> str:
    notes = list(report.notes)
    if report.num_below:
        notes.append(f"{report.num_below} more below {100 * report.threshold:g} % of a step")
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section class="warn"><h2>Before acting on it</h2><ul>{items}</ul></section>'


def _modules(report: AuditReport) -> str:
    cells = rows(report)
    used = [place for place in range(len(COLUMNS)) if any(row[place] for row in cells)]
    head = "".join(f"<th scope=col{' class=n' * (place > 0)}>{COLUMNS[place]}</th>" for place in used)
    body = "".join(
        "<tr>" + "".join(f"<td{' class=n' * (place > 0)}>{escape(row[place])}</td>" for place in used) + "</tr>"
        for row in cells
    )
    return (
        '<section><h2>What was executed and kept, by module</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="modules"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        "<p class=note>FLOPs of a step, bytes of a backward pass; again: a forward that ran again inside the backward."
        "</p>"
        "</section>"
    )
