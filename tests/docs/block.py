"""The fenced blocks of what people read: README, CONTRIBUTING, ARCHITECTURE, guide, results, READMEs of plugins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FILES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "results").glob("*.md")),
    *sorted((ROOT / "plugins").glob("*/README.md")),
]
# These pages are followed from top to bottom in an empty folder: test_newcomer.py, the last one in test_use.py.
FOLLOWED = [ROOT / "docs" / "guide" / name for name in ("own-data.md", "chat.md", "use.md")]
LINK = re.compile(r"\]\(([^)#\s]*)#?([^)\s]*)\)")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block.

    Args:
        file: Page of the documentation.
        line: Number of its first line, counted from 1.
        text: Lines without the fences.
    """

    file: Path
    line: int
    text: str

    @property
    def place(self) -> str:
        """File and line, for the name of a test."""
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """Return every block of a language, in the order of files and lines."""
    found = []
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        found += [
            Block(file, text.count("\n", 0, match.start()) + 2, match[2])
            for match in FENCE.finditer(text)
            if match[1] == language
        ]
    return found


def commands() -> list[Block]:
    """Return every line of a console block that a person would type, without its prompt."""
    found = []
    for block in blocks("console"):
        for number, line in enumerate(block.text.splitlines()):
            if line.startswith("$ "):
                found.append(Block(block.file, block.line + number, line.removeprefix("$ ")))
    return found
