"""Escape untrusted text (event logs, stores, other machines, logs) for display, and mask passwords.

Terminals interpret control characters, and both terminals and browsers interpret marks of writing direction. A run
could otherwise repaint the screen, set the clipboard, or show a sentence in another order than stored. So all such text
passes through :func:`make_visible` first: in the command line when it prints, in the report when it writes.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus

__all__ = ["make_visible", "mask"]

_INTERPRETED = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and line feed: ESC starts terminal sequences
    "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"  # marks of writing direction, invisible characters
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # other line ends, byte-order mark, annotations
    "\ud800-\udfff"  # lone surrogates, which no stream can encode
    "\U000e0000-\U000e007f"  # invisible copies of ASCII
    "]"
)
_ADDRESS = re.compile(r"://(\S*)")
# The possessive `++` avoids quadratic time on long words without a match.
_OPTION = re.compile(r"(?<![\w.%+-])([\w.%+-]++)(\s?=\s?)('[^']*'|[^&;,\s]+)")
_SECRET_NAME = re.compile(
    r"(pass|passwd|password|passphrase|pwd|token|secret|credentials?|(api|access|private|secret)_?key|signature)$"
    r"|^sig$|^auth$|^odbc_connect$",
    re.IGNORECASE,
)
_HEADER = re.compile(r"\b(Bearer|Basic)\s+[\w+/.=~-]{8,}", re.IGNORECASE)


def make_visible(text: str) -> str:
    r"""Return a text with the characters that a terminal or a browser would interpret replaced by JSON escapes, such as
    ``\u001b``. So JSON keeps its meaning. Tabs and line feeds stay."""
    return _INTERPRETED.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def mask(text: str) -> str:
    """Replace user, password and secret options of every address in a text by ``***``. In doubt, replace more."""
    text = _ADDRESS.sub(_hide_user, text)
    return _HEADER.sub(r"\1 ***", _OPTION.sub(_hide_secret, text))


def _hide_user(found: re.Match[str]) -> str:
    """Hide user and password. Passwords may hold slashes and at-signs, so the last at-sign after a colon counts."""
    word = found[1]
    end = word.rfind("@")
    if ":" not in word[: max(end, 0)]:
        end = word.partition("/")[0].rfind("@")
    return found[0] if end < 0 else f"://***{word[end:]}"


def _hide_secret(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}***" if _SECRET_NAME.search(unquote_plus(found[1])) else found[0]
