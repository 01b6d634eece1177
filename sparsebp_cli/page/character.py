"""Escape the characters that a page or a terminal would interpret."""

from __future__ import annotations

import re

_INTERPRETED = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and line feed: ESC starts terminal sequences
    "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"  # marks of writing direction, invisible characters
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # other line ends, byte-order mark, annotations
    "\ud800-\udfff"  # lone surrogates, which no stream can encode
    "\U000e0000-\U000e007f"  # invisible copies of ASCII
    "]"
)


def make_visible(text: str) -> str:
    r"""Return a text with the characters that a terminal or a browser would interpret replaced by JSON escapes, such as
    ``\u001b``. So JSON keeps its meaning. Tabs and line feeds stay."""
    return _INTERPRETED.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
