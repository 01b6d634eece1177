"""Show an event log's proof as a table: what a run's backward executed and stored, module by module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparsebp_cli.cli.quantity import show_count, show_share
from sparsebp_cli.cli.screen import make_table
from sparsebp_cli.run.record_type import ProofValues

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, float | None]


@dataclass
class Modules:
    """Modules whose names differ only in the layer's number. ``name`` has a star instead of the number."""

    name: str
    rows: list[Row] = field(default_factory=list)

    def sum(self, column: str) -> float:
        return sum(row.get(column) or 0.0 for row in self.rows)

    def mean(self, column: str) -> float | None:
        """Return a column's mean over the modules that have it; None if none has it."""
        known = [value for row in self.rows if (value := row.get(column)) is not None]
        return sum(known) / len(known) if known else None

    def share(self, column: str, of: str) -> float | None:
        """Return one column's sum over another's; None if that is zero."""
        whole = self.sum(of)
        return self.sum(column) / whole if whole else None


def read_rows(proof: ProofValues) -> dict[str, Row]:
    """Return a stored proof as column to value, by module."""
    return {name: dict(zip(proof["columns"], row, strict=False)) for name, row in proof["modules"].items()}


def gather(proof: ProofValues) -> Iterator[Modules]:
    """Group the modules of all layers. Yield those that computed or stored anything, largest dense backward first."""
    found: dict[str, Modules] = {}
    for name, row in read_rows(proof).items():
        star = re.sub(r"(^|.*?\.)\d+(?=\.|$)", "*", name, count=1) or "(model and loss)"
        found.setdefault(star, Modules(star)).rows.append(row)
    work = ("dense_backward_flops", "backward_flops", "recomputed_flops", "dense_saved_bytes", "saved_bytes")
    busy = [modules for modules in found.values() if any(modules.sum(column) for column in work)]
    yield from sorted(busy, key=lambda modules: [-modules.sum(column) for column in work])


def proof_table(proof: ProofValues, step: int) -> Table:
    """Return the proof of this step as a table of rich. Fractions are of the dense pass on the same batch."""
    gathered = list(gather(proof))
    columns = {
        "FLOP": [_count(modules.sum("backward_flops")) for modules in gathered],
        "of dense": [_share(modules.share("backward_flops", "dense_backward_flops")) for modules in gathered],
        "again": [_count(modules.sum("recomputed_flops")) for modules in gathered],
        "rows": [_share(modules.share("rows", "dense_rows")) for modules in gathered],
        "saved B": [_count(modules.sum("saved_bytes")) for modules in gathered],
        "of dense ": [_share(modules.share("saved_bytes", "dense_saved_bytes")) for modules in gathered],
        "kept": [_share(modules.mean("kept_share")) for modules in gathered],
    }
    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    title = f"FLOPs and bytes of one backward pass, counted at step {step}; `of dense`: divided by those of dense"
    table = make_table("modules", *shown, numbers=list(shown), title=title)
    for modules, *cells in zip(gathered, *shown.values(), strict=True):
        table.add_row(modules.name, *cells)
    return table


def _count(value: float) -> str:
    return show_count(value) if value else ""


def _share(value: float | None) -> str:
    return "" if value is None else show_share(value)
