"""Tables of the page on the judge, from what benchmarks/judge.py and benchmarks/judge_climb.py wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from generator.markdown import table

PLACE = re.compile(r"(<!-- judge: (\w+) -->\n).*?(<!-- end of judge -->)", re.DOTALL)


def page(root: Path) -> str:
    """Return the page with its tables."""
    text = (root / "docs" / "results" / "judge.md").read_text(encoding="utf-8")
    results = root / "benchmarks" / "results"
    record, climb = (
        json.loads((results / name).read_text(encoding="utf-8")) for name in ("judge.json", "judge-climb.json")
    )
    made = {"nights": _nights(record), "bounds": _bounds(record), "climb": _climb(climb)}
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


def _climb(record: Any) -> str:
    counts = [sum(one["null"] is wanted for one in record["proposals"]) for wanted in (False, True)]
    heads = ("rule", f"kept of {counts[0]} real", f"kept of {counts[1]} nulls", "gain it shows")
    rows = []
    for rule, winner in record["winners"].items():
        kept = [one for one in record["proposals"] if one[rule]["kept"]]
        nulls, true = sum(one["null"] for one in kept), winner["true"]
        gain = f"{true['mean']:.3f} ({true['low']:.3f} to {true['high']:.3f})" if true else ""
        rows.append((rule, str(len(kept) - nulls), str(nulls), f"{winner['shown']:.3f}", gain, str(winner["runs"])))
    return table((*heads, f"gain on {len(record['seeds'])} fresh seeds", "runs"), rows) + "\n"
