"""The measured numbers in the README: parts of a recorded comparison between two comments.

`make picture` records it: `docs/picture/quickstart.md` is the output of `sparsebp compare -o md`, never edited.
"""

from __future__ import annotations

import re
from pathlib import Path

RECORDED = "docs/picture/quickstart.md"
PLACE = re.compile(r"(<!-- numbers: quickstart -->\n).*?(<!-- end of numbers -->)", re.DOTALL)
SHOWN = ("Quality", "Speed", "Backward work", "In words")


def page(root: Path) -> str:
    """Return the README with the recorded numbers, or unchanged if nothing was recorded."""
    text = (root / "README.md").read_text(encoding="utf-8")
    assert PLACE.search(text), "README.md has lost the place of its numbers"
    recorded = root / RECORDED
    if not recorded.exists():
        return text
    parts = [part.partition("\n") for part in recorded.read_text(encoding="utf-8").split("### ")[1:]]
    shown = "\n\n".join(f"**{title}**\n\n{body.strip()}" for title, _, body in parts if title.startswith(SHOWN))
    return PLACE.sub(lambda match: f"{match[1]}{shown}\n{match[2]}", text)
