"""Tables of recorded timings in pages of the guide, from what benchmarks write to benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from generator.markdown import table

PLACE = re.compile(r"(<!-- timing: (\w+) -->\n).*?(<!-- end of timing -->)", re.DOTALL)
PLAIN = {"rows": "head of labelled rows", "padding-free": "without padding", "padded": "padded"}


def lossless_page(root: Path) -> str:
    """Return the page of lossless with its timings."""
    return _fill(root, "lossless", _lossless)


def blocks_page(root: Path) -> str:
    """Return the page of dropped blocks with its timings."""
    return _fill(root, "blocks", _dropbp)


def _fill(root: Path, page: str, make: Callable[[Any], str]) -> str:
    text = (root / "docs" / "guide" / f"{page}.md").read_text(encoding="utf-8")
    assert PLACE.search(text), f"{page}.md has lost the place of its timings"

    def fill(match: re.Match[str]) -> str:
        file = root / "benchmarks" / "results" / f"{match[2]}-cpu.json"
        return f"{match[1]}{make(json.loads(file.read_text(encoding='utf-8')))}{match[3]}"

    return PLACE.sub(fill, text)


def _lossless(record: Any) -> str:
    rows = []
    for name, ways in record["cases"].items():
        by_way = {way["way"]: way for way in ways}
        own, padded = by_way.pop("lossless"), by_way["padded"]
        best = max(by_way.values(), key=lambda way: float(way["speedup"]))
        rows.append(
            [
                name,
                f"{own['speedup']:.2f}x ({own['ratio']['low']:.2f} to {own['ratio']['high']:.2f} of the time)",
                f"{own['flops_share']:.0%}",
                f"{own['peak_bytes'] / padded['peak_bytes']:.0%}",
                f"{best['speedup']:.2f}x ({PLAIN[best['way']]})",
            ]
        )
    about = record["about"]
    head = (
        f"A llama of {about['parameters'] / 1e6:.0f}M parameters, float32, {about['threads']} CPU cores, torch "
        f"{about['torch'].partition('+')[0]}, transformers {about['transformers']}. Medians over rounds in which every "
        "way runs once, over the padded step of the same round; quartiles in brackets.\n\n"
    )
    return head + table(["batch", "lossless", "FLOPs", "peak of memory", "best plain form"], rows)


def _dropbp(record: Any) -> str:
    rows = [
        [
            f"`{name}`",
            *(
                f"{way[key]['median']:.2f}x ({way[key]['low']:.2f} to {way[key]['high']:.2f})"
                for key in ("step_speedup", "backward_speedup")
            ),
            f"{way['flops_share']:.0%}",
            f"{way['saved_share']:.0%}",
        ]
        for name, way in record["ways"].items()
        if name != "dense"
    ]
    versions = record["versions"]
    head = (
        f"A llama of {record['model']['num_parameters'] / 1e6:.0f}M parameters, {record['batch'][0]} x "
        f"{record['batch'][1]} tokens, float32, AdamW, {record['threads']} CPU threads, "
        f"torch {versions['torch'].partition('+')[0]}, {record['rounds']} rounds in which every way runs once; "
        "medians over dense in the same round, quartiles in brackets.\n\n"
    )
    return head + table(["way", "whole step", "backward", "FLOPs", "bytes kept"], rows)
