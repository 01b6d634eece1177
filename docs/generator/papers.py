"""What came of the small forms of published tables: the tables of docs/results/papers.md about them.

Written from `docs/results/papers.json`, which `python benchmarks/papers.py` writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generator.markdown import code, table

PLACE = re.compile(r"(<!-- papers: ran -->\n).*?(<!-- end of papers -->)", re.DOTALL)


def page(root: Path) -> str:
    """Return the page, with what ran."""
    text = (root / "docs" / "results" / "papers.md").read_text(encoding="utf-8")
    assert len(PLACE.findall(text)) == 1, "papers.md lost the place of what ran"
    record = json.loads((root / "docs" / "results" / "papers.json").read_text(encoding="utf-8"))
    names = sorted(file.stem for file in (root / "recipes" / "papers").glob("*.yaml"))
    made = "\n".join(_describe(record["studies"], names))
    return PLACE.sub(lambda match: f"{match[1]}{made}\n{match[2]}", text)


def _describe(studies: list[Any], names: list[str]) -> Iterator[str]:
    ran = [study for study in studies if any(arm["seeds"] for arm in study["arms"])]
    arms = [arm for study in ran for arm in study["arms"]]
    seconds = sum(arm["cpu_seconds"] for arm in arms)
    finished = sum(len(arm["seeds"]) for arm in arms)
    changed = sum(any("uncommitted changes" in arm["verdict"] for arm in study["arms"]) for study in ran)
    yield (
        f"{finished} runs of {len(ran)} studies. Their steps took {seconds:,.0f} s of CPU time. In {changed} studies "
        "the checkout had uncommitted changes.\n"
    )
    yield table(("study", "model", "data", "steps x batch", "metric"), [_row(study) for study in ran])
    yield table(
        ("study", "group", "seeds", "value", "held by a step", "CPU s", "beside the baseline"), list(_arms(ran))
    )
    missing = [name for name in names if name not in {study["study"] for study in ran}]
    if missing:
        yield f"\nNot run: {', '.join(map(code, missing))}."


def _row(study: Any) -> list[str]:
    return [
        code(study["study"]), code(study["model"]), code(study["data"]), f"{study['steps']} x {study['batch']}",
        f"{code(study['metric'])}, {study['better']} is better",
    ]  # fmt: skip


def _arms(studies: list[Any]) -> Iterator[list[str]]:
    for study in studies:
        for arm in study["arms"]:
            value = "-" if arm["mean"] is None else f"{arm['mean']:.4g}"
            value += "" if arm["sd"] is None else f" ± {arm['sd']:.2g}"
            held = "-" if arm["held_bytes"] is None else f"{arm['held_bytes'] / 1e6:.0f} MB"
            seeds = ", ".join(map(str, arm["seeds"])) or "none finished"
            said = arm["verdict"].partition(";")[0].partition(" (")[0].removesuffix(".")  # of quality; no interval
            yield [code(study["study"]), arm["arm"], seeds, value, held, f"{arm['cpu_seconds']:.0f}", said]
