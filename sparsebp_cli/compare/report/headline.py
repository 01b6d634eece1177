"""Make the first sentence of the report, which sorts groups by their statements on quality."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.statement import OUTCOMES, Outcome, Statement
from sparsebp_cli.compare.words import say

MOST_NAMES = 6
OTHER_TRAINING = "with another number of steps or another batch size"
HEADINGS: dict[Outcome, str] = {"lower": f"lower {OTHER_TRAINING}", "higher": f"higher {OTHER_TRAINING}"}


def make_headline(comparison: Comparison) -> str:
    """Return one sentence: the main finding of the only group, with its time if exact, or the groups by finding."""
    base, *others = comparison.groups
    if not others:
        return f"{base.label} alone: there is nothing to compare it with."
    if len(others) == 1:
        return f"{others[0].label} against {base.label}: {'; '.join(map(say, find_main(others[0])))}."
    labels: dict[Outcome, list[str]] = {}
    for group in others:
        if (quality := group.find("quality")) is not None:
            labels.setdefault(quality.outcome, []).append(group.label)
    parts = [f"{HEADINGS.get(word, word)}: {join_names(labels[word])}" for word in OUTCOMES if word in labels]
    return f"Against {base.label} in {comparison.metric}: {'; '.join(parts)}."


def find_main(group: Group) -> list[Statement]:
    """Return the statement on quality, and for an exact policy those on cost and step time, over all steps."""
    quality = group.find("quality")
    saved = (group.find("cost"), group.find("step time")) if quality and quality.outcome == "exact" else ()
    return [one for one in (quality, *saved) if one is not None and (one.numbers or one is quality)]


def join_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def find_withheld(comparison: Comparison) -> list[str]:
    """Return the labels of the groups whose step times are withheld."""
    return [group.label for group in comparison.groups if group.speed.withheld]
