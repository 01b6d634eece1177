"""The memory of a run's watched step: a table for the terminal, and a picture of its curves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebp_cli.cli.quantity import show_count, show_share
from sparsebp_cli.cli.screen import make_table
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.run.memory import PARTS, PHASES, MemoryCurve
from sparsebp_cli.run.picture import WORDS, save_curves

if TYPE_CHECKING:
    from rich.table import Table


def memory_table(values: dict[str, Any], step: int) -> Table:
    """Return a table of a watched step's parts: at the peak, at their own highest, and at the peak of each phase."""
    curve = MemoryCurve.from_values(values)
    peak, highest = curve.peak, dict(zip(PARTS, values["highest"], strict=True))
    by_phase = {phase: point.split for phase in PHASES if (point := curve.within(phase)) is not None}
    columns = ("at the peak", "share", "highest", *by_phase)
    title = f"memory: live tensors of step {step}; its peak is in the {peak.phase}; last, the peaks of the phases"
    if values.get("allocator_peak_bytes"):
        title += f" (the device's allocator reports {show_count(values['allocator_peak_bytes'], 'B')})"
    table = make_table("part", *columns, numbers=list(columns), title=title)
    for part in PARTS:
        here = getattr(peak.split, part)
        share = show_share(here / peak.split.total) if peak.split.total else ""
        phases = [show_count(getattr(split, part), "B") for split in by_phase.values()]
        table.add_row(WORDS[part], show_count(here, "B"), share, show_count(highest[part], "B"), *phases)
    totals = [show_count(split.total, "B") for split in by_phase.values()]
    table.add_row("all", show_count(peak.split.total, "B"), "", "", *totals)
    return table


def draw_run_memory(folder: RunFolder, path: Path) -> Path:
    """Draw the memory curves of all watched steps of a run to ``.png``, ``.svg`` or ``.pdf``.

    Raises ``UsageError`` if no step was watched, or the path is not one of a picture.
    """
    found = History.load(folder.path).memory
    if not found:
        raise UsageError(
            f"run {folder.run_id} has no memory of a step: where measure.probe_every is set, a step of warm-up and the "
            "last are watched"
        )
    return save_curves([(f"step {step}", MemoryCurve.from_values(found[step])) for step in sorted(found)], path)
