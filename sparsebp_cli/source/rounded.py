"""Detect models whose adapters were merged over a quantised base. Quantising them again loses what the adapters learnt.

A dequantised base has only the few values of its quantised type. What adapters add is mostly smaller than the distance
to the next value, so quantising the sum returns the base.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TAG = "merged-over-"  # followed by the base's type: a tag in a model card
LARGEST = 1024 * 1024


def find_rounded(folder: Path) -> str | None:
    """Return the type to which a merged model's base was quantised. Return None if neither the model card of ``sparsebp
    model`` nor the plan of the folder's run says so."""
    lines = _read(folder / "README.md").split("\n---\n")[0].splitlines()
    tags = [line.removeprefix("- ").strip("'\"") for line in lines if line.startswith("- ")]
    found = next((tag.removeprefix(TAG) for tag in tags if tag.startswith(TAG)), None)
    return found or _of_run(folder)


def _of_run(folder: Path) -> str | None:
    try:
        plan: Any = json.loads(_read(folder.parent / "plan.json") or "null")
        found = plan["recipe"]["model"]["quantization"]["type"]
    except (ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _read(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(LARGEST)
    except OSError:
        return ""
