"""Text from elsewhere (journals, stores, other machines, logs) made safe to show.

A terminal obeys control characters, and both terminals and browsers obey marks of writing direction: a run could
otherwise repaint the screen, set the clipboard or show a sentence in another order than it is stored. Whatever shows
such text passes it through :func:`make_visible` first: the command line where it prints, the report where it writes.
"""

from __future__ import annotations

import re

_OBEYED = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed: ESC begins the sequences of terminals
    "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"  # marks of writing direction, invisible ones
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # line ends of other kinds, byte-order mark, annotations
    "\ud800-\udfff"  # half of a surrogate pair: no stream can encode it
    "\U000e0000-\U000e007f"  # invisible copies of ASCII
    "]"
)


def make_visible(text: str) -> str:
    r"""Return a text in which everything that a terminal or a browser would obey is written out.

    Args:
        text: From anywhere. Tabs and line feeds stay.

    Returns:
        The text with ``\u001b`` in place of an escape character, and so on: the escapes of JSON, so that JSON stays
        the same JSON.
    """
    return _OBEYED.sub(_write_out, text)


def _write_out(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
