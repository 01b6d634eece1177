"""What was found of one rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"
SHOWN = 5  # texts shown in a line; the others are counted


class RuleFinding(NamedTuple):
    """The finding for one rule."""

    level: str  # ok, warn or fail
    what: str  # the rule, in one or two words
    text: str  # the finding
    hint: str = ""  # what to do


def decide(what: str, wrong: Sequence[str], text: str, *, hint: str = "", between: str = "; ") -> RuleFinding:
    """Return a finding that fails and lists ``wrong``, or passes with ``text`` if the list is empty."""
    return RuleFinding(FAIL, what, join(wrong, between), hint) if wrong else RuleFinding(OK, what, text)


def join(texts: Sequence[str], between: str = ", ") -> str:
    """Join the first texts in a line, with the number of further ones."""
    more = f"{between}and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return between.join(texts[:SHOWN]) + more
