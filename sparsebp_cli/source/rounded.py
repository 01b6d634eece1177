"""Models whose adapters were merged over a quantised base: quantised again, they lose what the adapters learnt.

The restored weights of the base lie on the few values of its type. What adapters add is mostly smaller than the
distance to the next value, so quantising the sum returns the base.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TAG = "merged-over-"  # and the type of the base; among the tags of a model card
LARGEST = 1024 * 1024


def find_rounded(folder: Path) -> str | None:
    """Return the type to which the base of a merged model was quantised; None if nothing in its folder says so: the
    card of ``sparsebp model``, or the plan of the run that the folder belongs to."""
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
