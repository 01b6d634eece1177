"""Show the report of an audit as one HTML page without a script."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from sparsebp_audit.report.report import AuditReport, Finding, ModuleWork
from sparsebp_cli.compare.page import check_path, render
from sparsebp_cli.run import durable

COLUMNS = ("modules", "forward", "dgrad", "wgrad", "other", "again", "wasted", "saved", "wasted bytes")
_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def gather(modules: Iterable[ModuleWork]) -> list[ModuleWork]:
    """Sum the modules of all layers; a star stands for the layers' prefix and number."""
    found: dict[str, dict[str, float]] = {}
    for row in modules:
        star = _star(row.module) or "(model and loss)"
        sums = found.setdefault(star, {})
        for part in fields(row)[1:]:
            sums[part.name] = sums.get(part.name, 0.0) + getattr(row, part.name)
    return [ModuleWork(name, **sums) for name, sums in found.items()]


def rows(report: AuditReport) -> list[tuple[str, ...]]:
    """Return a report's modules as rows of cells, as long as ``COLUMNS``; empty cells mean zero."""
    return [
        (
            row.module,
            *(_cell(value) for value in (row.forward_flops, row.dgrad_flops, row.wgrad_flops, row.other_flops)),
            _cell(row.recomputed_flops),
            _cell(row.wasted_flops),
            _cell(row.saved_bytes, "B"),
            _cell(row.wasted_bytes, "B"),
        )
        for row in gather(report.modules)
    ]


def summary(report: AuditReport) -> list[str]:
    """Return lines about what was audited."""
    passes = f"{report.backwards} backward pass{'es' * (report.backwards != 1)}"
    return [
        f"watched {report.steps} step{'s' * (report.steps != 1)} with {passes}",
        f"a step: forward {count(report.forward_flops, 'FLOP')}, backward {count(report.backward_flops, 'FLOP')}"
        + (f", recomputed in the backward {count(report.recomputed_flops, 'FLOP')}" if report.recomputed_flops else "")
        + (f"; forwards without gradients {count(report.ungraded_flops, 'FLOP')}" if report.ungraded_flops else ""),
        f"memory: parameters {count(report.parameter_bytes, 'B')}, gradients {count(report.gradient_bytes, 'B')}, "
        f"optimizer {count(report.optimizer_bytes, 'B')}, saved for a backward {count(report.saved_bytes, 'B')}",
    ]


def count(value: float, unit: str = "") -> str:
    """Return a large number with three digits: ``8.19 kB``, ``33.1 GFLOP``, ``0 B``."""
    for size, prefix in _STEPS:
        if value >= size:
            scaled = value / size
            text = f"{scaled:.2f}" if scaled < 9.995 else f"{scaled:.1f}" if scaled < 99.95 else f"{scaled:.0f}"
            return f"{text} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def where(modules: Iterable[str], most: int = 3) -> str:
    """Return a few names of modules, layers combined, such as ``*.q_proj, lm_head and 2 more``; empty for none."""
    stars = list(dict.fromkeys(_star(name) or "(model)" for name in modules))
    more = f" and {len(stars) - most} more" if len(stars) > most else ""
    return ", ".join(stars[:most]) + more


def _star(name: str) -> str:
    """Replace a module's layer prefix and number by a star; a layer's own name keeps its prefix."""
    return re.sub(r"\.\d+$", ".*", re.sub(r"^(.*?\.)?\d+(?=\.)", "*", name, count=1))


def _cell(value: float, unit: str = "") -> str:
    return count(value, unit) if value >= 0.5 else ""


BOUND = (
    "Savings are upper bounds, from FLOPs and bytes: the time saved depends on the machine's kernels. No two "
    "findings count the same work. Bytes saved for the backward are those of one backward pass."
)


def write_page(report: AuditReport, path: Path, command: str = "") -> Path:
    """Write the report of an audit as one HTML page to an ``.html`` file, replacing it, and return its path.
    ``command`` is the audited command; empty omits it. Raise UsageError for another ending, or if the folder does not
    exist."""
    check_path(path)
    durable.write_file(path, render_page(report, command))
    return path


def render_page(report: AuditReport, command: str = "") -> str:
    """Return the report as HTML; ``command`` is the audited command, empty omits it."""
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
        applied=[] if report.applied is None else report.applied.lines(),
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
