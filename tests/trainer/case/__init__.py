"""A user's script as it was, and the two lines in which it changes."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BEFORE = (FOLDER / "before.py").read_text(encoding="utf-8")
TWO_LINES = (FOLDER / "two-lines.diff").read_text(encoding="utf-8")


def changed(text: str, difference: str) -> str:
    """Return a text with each line that begins with ``-`` replaced by the one with ``+`` that follows it."""
    lines = difference.splitlines()
    for old, new in zip(lines[::2], lines[1::2], strict=True):
        if (old[0], new[0]) != ("-", "+") or text.count(f"{old[1:]}\n") != 1:
            raise ValueError(f"{old!r} is not one line of the script")
        text = text.replace(f"{old[1:]}\n", f"{new[1:]}\n")
    return text


def load(text: str) -> Any:
    """Return a script as a module, without running what it does as a script."""
    module = types.ModuleType("script")
    exec(compile(text, "script.py", "exec"), vars(module))
    return module


def before() -> Any:
    """Return the script as it was."""
    return load(BEFORE)


def after(mode: str = "detach") -> Any:
    """Return the script with its two lines changed."""
    return load(changed(BEFORE, TWO_LINES).replace('"mode": "detach"', f'"mode": "{mode}"'))
