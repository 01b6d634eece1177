"""What was found of one rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"
SHOWN = 5  # texts in a line; the rest is counted


class Finding(NamedTuple):
    """What was found of one rule."""

    level: str  # ok, warn or fail
    what: str  # the rule, in a word or two
    text: str  # what was found
    hint: str = ""  # what to do


def decide(what: str, wrong: Sequence[str], text: str, *, hint: str = "", between: str = "; ") -> Finding:
    """Return a rule that fails for what is wrong, and is kept, with a text, where nothing is."""
    return Finding(FAIL, what, join(wrong, between), hint) if wrong else Finding(OK, what, text)


def join(texts: Sequence[str], between: str = ", ") -> str:
    """Return the first of some texts in a line, and how many there are more."""
    more = f"{between}and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return between.join(texts[:SHOWN]) + more
