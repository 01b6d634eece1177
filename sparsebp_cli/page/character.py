"""The characters that a page or a terminal would interpret, and their escapes."""

from __future__ import annotations

import re

_INTERPRETED = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed: ESC begins the sequences of terminals
    "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"  # marks of writing direction, invisible ones
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # line ends of other kinds, byte-order mark, annotations
    "\ud800-\udfff"  # lone surrogates, which no stream can encode
    "\U000e0000-\U000e007f"  # invisible copies of ASCII
    "]"
)


def make_visible(text: str) -> str:
    r"""Return a text in which characters that a terminal or a browser would interpret are replaced by the escapes of
    JSON, such as ``\u001b``, so that JSON stays the same JSON. Tabs and line feeds stay."""
    return _INTERPRETED.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
