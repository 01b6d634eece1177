"""Summarise a run's data statistics (census): what each split read, dropped and cut, and which warnings follow.

Statistics are plain data, so the event log, MLflow and programs get them unchanged::

    {"splits": {"train": {"rows": 90, "examples": 88, "dropped": {"the prompt fills max_seq_length": 2}, "cut": 1,
                          "cut_reasons": {...}, "tokens": 4000, "targets": 1600, "target_share": 0.4,
                          "lengths": {"shortest": 3, "quarter": 9, "median": 12, "three_quarters": 20, "longest": 64},
                          "duplicates": 0, "classes": {"good": 45, "bad": 43}, "left_over_tokens": 0,
                          "unused_examples": 0,
                          "texts": {"rows": 88, "affected": 0, "prompts": 88, "turns": 88, "faults": []}},
                "validation": {...}},
     "shared": {"train, validation": 0}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from sparsebp_cli.run.text_fault import describe_fault, judge_fault

Census = Mapping[str, Any]


MOST_LOST = 0.1  # larger fractions of lost rows in a split cause a warning
MOST_CLASSES = 5  # at most so many are named in a warning
# Keys in which two runs' statistics are compared.
COMPARED = (
    "rows",
    "examples",
    "dropped",
    "cut",
    "tokens",
    "targets",
    "classes",
)


def find_warnings(census: Census) -> Iterator[tuple[Literal["info", "warning"], str]]:
    """Yield findings that a user should see, one line each, with numbers."""
    for name, split in census["splits"].items():
        for lost, verb in ((split["dropped"], "dropped"), (split["cut_reasons"], "cut")):
            many = sum(lost.values())
            if many:
                reasons = ", ".join(f"{number} because {reason}" for reason, number in lost.items())
                reasons = reasons if len(lost) > 1 else next(iter(lost))
                level: Literal["info", "warning"] = "warning" if many > MOST_LOST * split["rows"] else "info"
                yield level, f"data: {many} of {split['rows']} {name} rows are {verb}: {reasons}"
    for name, split in census["splits"].items():
        for fault in split.get("texts", {}).get("faults", ()):  # runs of 0.5 have no "texts"
            yield "info" if judge_fault(fault) == "info" else "warning", f"data: {name}: {describe_fault(fault)}"
    known = dict.fromkeys(label for split in census["splits"].values() for label in split["classes"])
    for name, split in census["splits"].items():
        missing = [label for label in known if not split["classes"].get(label)]
        if missing:
            named = ", ".join(missing[:MOST_CLASSES]) + (", ..." if len(missing) > MOST_CLASSES else "")
            yield "warning", f"data: {name} has no example of {len(missing)} of {len(known)} classes: {named}"
    for pair, number in census["shared"].items():
        one, other = pair.split(", ")
        if number:
            rows = census["splits"][other]["rows"]
            yield "warning", f"data: {number} of {rows} {other} rows are also in {one}"


def summarise_census(census: Census) -> str:
    """Return the statistics that should agree between two runs, in one line, split by split."""
    parts = []
    for name, split in census["splits"].items():
        lost = sum(split["dropped"].values())
        parts.append(
            f"{name} {split['examples']} of {split['rows']} rows ({lost} dropped, {split['cut']} cut), "
            f"{split['tokens']} tokens, {split['targets']} targets"
        )
    return "; ".join(parts)
