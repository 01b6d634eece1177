"""The dataset ``austen``: two novels by Jane Austen, one row a chapter.

Source: the texts of the R package janeaustenr (Julia Silge), which come from Project Gutenberg. Both novels were
published in 1817 and are in the public domain. *Northanger Abbey* is the split ``train``. *Persuasion* is ``test``; it
was held out when austen-llama was pretrained, so its loss shows what the model forgot in fine-tuning.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "data" / "austen"
BOOKS = {"train": "northangerabbey.txt", "test": "persuasion.txt"}

# "Chapter 1", "CHAPTER XII", "VOLUME I": alone on a line.
_HEADING = re.compile(r"(?im)^(?=(?:chapter|volume)[ \t]+[0-9ivxlc]+\.?[ \t]*$)")


def chapters(text: str) -> list[str]:
    """Split a novel before each heading, into pieces without surrounding blanks; text before the first heading is the
    first piece."""
    return [piece.strip() for piece in _HEADING.split(text) if piece.strip()]


def load() -> dict[str, list[dict[str, str]]]:
    """Return the splits ``train`` and ``test``, each a list of rows with the column ``text``."""
    return {
        split: [{"text": chapter} for chapter in chapters((FOLDER / book).read_text(encoding="utf-8"))]
        for split, book in BOOKS.items()
    }
