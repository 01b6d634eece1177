"""The measured numbers in README and quickstart page: parts of a recorded comparison between two comments.

`make picture` records it: `docs/picture/quickstart.md` is the output of `sparsebp compare -o md`, never edited.
"""

from __future__ import annotations

import re
from pathlib import Path

RECORDED = "docs/picture/quickstart.md"
PLACE = re.compile(r"(<!-- numbers: quickstart -->\n).*?(<!-- end of numbers -->)", re.DOTALL)
WORDS = ("In words",)


def page(root: Path, name: str = "README.md", shown: tuple[str, ...] = WORDS) -> str:
    """Return a page with those parts of the recorded numbers, or unchanged if nothing was recorded."""
    text = (root / name).read_text(encoding="utf-8")
    assert PLACE.search(text), f"{name} has lost the place of its numbers"
    recorded = root / RECORDED
    if not recorded.exists():
        return text
    parts = [part.partition("\n") for part in recorded.read_text(encoding="utf-8").split("### ")[1:]]
    found = [(title, body.strip()) for title, _, body in parts if title.startswith(shown)]
    headed = [body if len(found) == 1 else f"**{title}**\n\n{body}" for title, body in found]
    body = "\n\n".join(headed)
    return PLACE.sub(lambda match: f"{match[1]}{body}\n{match[2]}", text)


def quickstart(root: Path) -> str:
    """Return the page of the quickstart with the recorded numbers."""
    return page(root, "docs/guide/quickstart.md")
