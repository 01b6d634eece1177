"""Differences between recipes, and curves thinned to a few points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from sparsebp_cli.compare.comparison import Change
from sparsebp_cli.compare.grouping import Grouping
from sparsebp_cli.compare.loaded import LoadedRun

MOST_POINTS = 400  # of one curve; a screen shows fewer
NOT_A_CHANGE = ("name", "tracking.")

Item = TypeVar("Item")


def thin(points: Sequence[Item], most: int = MOST_POINTS) -> tuple[Item, ...]:
    """Return at most ``most`` points, in [20, 400], evenly spaced, with the first and the last."""
    most = max(20, min(most, MOST_POINTS))
    if len(points) <= most:
        return tuple(points)
    return tuple(points[round(i * (len(points) - 1) / (most - 1))] for i in range(most))


def find_changes(baseline: LoadedRun, other: LoadedRun, grouping: Grouping) -> tuple[Change, ...]:
    """Return the keys in which two recipes differ, in the order of a recipe, with both values.

    Names, tracking, seeds and keys that the grouping ignores are no difference.
    """
    a, b = baseline.flat, other.flat
    paths = [path for path in dict.fromkeys([*a, *b]) if a.get(path) != b.get(path)]
    sections = list(dict.fromkeys([*baseline.recipe, *other.recipe]))
    paths.sort(key=lambda path: sections.index(path.split(".")[0]) if path.split(".")[0] in sections else -1)
    hidden = {path for path in paths for run in (baseline, other) if grouping.hides(run, path)}
    shown = [path for path in paths if not path.startswith(NOT_A_CHANGE) and path not in hidden]
    return tuple(Change(path, a.get(path), b.get(path)) for path in shown)
