"""Text from elsewhere (journals, stores, other machines, logs) made safe to show, and addresses without passwords.

A terminal obeys control characters, and both terminals and browsers obey marks of writing direction: a run could
otherwise repaint the screen, set the clipboard or show a sentence in another order than it is stored. Whatever shows
such text passes it through :func:`make_visible` first: the command line where it prints, the report where it writes.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus

_OBEYED = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed: ESC begins the sequences of terminals
    "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"  # marks of writing direction, invisible ones
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # line ends of other kinds, byte-order mark, annotations
    "\ud800-\udfff"  # half of a surrogate pair: no stream can encode it
    "\U000e0000-\U000e007f"  # invisible copies of ASCII
    "]"
)

_ADDRESS = re.compile(r"://(\S*)")
_OPTION = re.compile(r"(?<![\w.%+-])([\w.%+-]++)(\s?=\s?)('[^']*'|[^&;,\s]+)")
_SECRET_NAME = re.compile(
    r"(pass|passwd|password|passphrase|pwd|token|secret|credentials?|(api|access|private|secret)_?key|signature)$"
    r"|^sig$|^auth$|^odbc_connect$",
    re.IGNORECASE,
)
_HEADER = re.compile(r"\b(Bearer|Basic)\s+[\w+/.=~-]{8,}", re.IGNORECASE)


def make_visible(text: str) -> str:
    r"""Return a text in which everything that a terminal or a browser would obey is written out.

    Args:
        text: From anywhere. Tabs and line feeds stay.

    Returns:
        The text with ``\u001b`` in place of an escape character, and so on: the escapes of JSON, so that JSON stays
        the same JSON.
    """
    return _OBEYED.sub(_write_out, text)


def mask(text: str) -> str:
    """Hide user, password and secret options of every address in a text.

    Args:
        text: An address, or any text that may hold some.

    Returns:
        The text with ``***`` in their place; in doubt more than needed.
    """
    text = _ADDRESS.sub(_hide_user, text)
    return _HEADER.sub(r"\1 ***", _OPTION.sub(_hide_secret, text))


def _hide_user(found: re.Match[str]) -> str:
    """A password may hold slashes and at-signs: with a colon before it, the last at-sign of the word counts."""
    word = found[1]
    end = word.rfind("@")
    if ":" not in word[: max(end, 0)]:
        end = word.partition("/")[0].rfind("@")
    return found[0] if end < 0 else f"://***{word[end:]}"


def _hide_secret(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}***" if _SECRET_NAME.search(unquote_plus(found[1])) else found[0]


def _write_out(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
