"""Pieces of Markdown for generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTICE = "<!-- Written by docs/generate.py. `make fix` writes it again; changes made here are lost. -->\n"


def head(title: str, text: str = "") -> str:
    """Return the beginning of a generated page: its title, and a text under it."""
    return "\n".join([NOTICE, f"# {title}", *(["", text] if text else []), ""])


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown cells; a vertical bar inside a cell is escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines) + "\n"


def code(text: object) -> str:
    """Return text without backticks in a code span; empty text stays empty."""
    return f"`{text}`" if str(text) else ""


def unwrap(docstring: str | None) -> str:
    """Return the prose of a docstring without the sections of its arguments; double backticks become single ones."""
    text = (docstring or "").partition("\n    Args:")[0].strip()
    lines = [line.strip() for line in text.splitlines()]
    return "\n".join(lines).replace("``", "`")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
