"""Tables of the page on the judge, from what benchmarks/judge.py wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from generator.markdown import table

PLACE = re.compile(r"(<!-- judge: (\w+) -->\n).*?(<!-- end of judge -->)", re.DOTALL)


def page(root: Path) -> str:
    """Return the page with its tables."""
    text = (root / "docs" / "guide" / "judge.md").read_text(encoding="utf-8")
    record = json.loads((root / "benchmarks" / "results" / "judge.json").read_text(encoding="utf-8"))
    made = {"nights": _nights(record), "bounds": _bounds(record)}
    assert {match[2] for match in PLACE.finditer(text)} == made.keys(), "judge.md lost the place of a table"
    return PLACE.sub(lambda match: f"{match[1]}{made[match[2]]}{match[3]}", text)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _nights(record: Any) -> str:
    rows = [
        (
            row["world"],
            row["rule"],
            f"{row['false']:.1%}",
            _number(row["power"]),
            _number(row["cost"], 1),
            _number(row.get("runs_null"), 1),
            _number(row.get("runs_real"), 1),
            _number(row.get("seen")),
            _number(row.get("fresh")),
        )
        for row in record["rows"]
    ]
    heads = (
        "proposals",
        "rule",
        "nights with a false keep",
        "power",
        "runs a proposal",
        "a null",
        "a real one",
        "shown too much",
        "on fresh seeds",
    )
    return table(heads, rows) + "\n"


def _bounds(record: Any) -> str:
    rows = [
        (f"{one['common']:g}", _number(one["null"]), _number(one["real"]), _number(one["night"]))
        for one in record["bounds"]
    ]
    return table(("variance in common", "a null", "a real one", "a proposal, a tenth real"), rows) + "\n"
