"""Compute the quality and the costs of each group, consistent with the statements.

Means over different seeds are not comparable: dense with three harder seeds looks worse than a policy that lost every
pair. So a group's quality is the baseline's mean plus its paired difference, and its times and memory are the
baseline's times their paired ratio. The main cost is in FLOPs, which are valid on a busy machine too. Withheld numbers
are unknown here.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsebp_cli.compare.comparison import Comparison, Group


@dataclass(frozen=True)
class Trade:
    """The quality and the costs of a group."""

    label: str  # label of the group
    # the baseline's mean plus the paired difference; the group's own mean if no seed is shared
    quality: float | None
    sd: float | None  # standard deviation over seeds
    # ``cost``: FLOPs of all steps over the baseline's; ``step_seconds``: median of a step; ``held_bytes``: the most
    # memory of a step. None if not measured, or withheld
    costs: dict[str, float | None]
    is_paired: bool = True  # whether it shares seeds with the baseline; if not, it is not ranked against other groups


def find_trades(comparison: Comparison) -> list[Trade]:
    """Return every group, in order, with its quality and costs."""
    return [_place(group, comparison.groups[0]) for group in comparison.groups]


def _place(group: Group, base: Group) -> Trade:
    own, difference = group.quality.final, group.quality.difference
    is_paired = group.baseline or (difference is not None and difference.n > 0)
    quality = own.mean if own else None
    if not group.baseline and is_paired and difference and base.quality.final:
        quality = base.quality.final.mean + (0.0 if _is_exact(group) else difference.mean)
    costs, bases = (
        {
            "cost": None if some.speed.cost is None else some.speed.cost.mean,
            "step_seconds": some.speed.step.median if some.speed.step else None,
            "held_bytes": some.cost.held_bytes,
        }
        for some in (group, base)
    )
    ratios = {"step_seconds": group.speed.step_ratio, "held_bytes": group.cost.held_ratio}
    for cost, ratio in ratios.items():
        there = bases[cost]
        if cost == "step_seconds" and group.speed.withheld:
            costs[cost] = None
        if group.baseline or ratio is None or not ratio.n or costs[cost] is None:
            continue
        costs[cost] = None if there is None else there * ratio.mean
    return Trade(group.label, quality, own.sd if own else None, costs, is_paired)


def _is_exact(group: Group) -> bool:
    """Return whether the statements say that a group differs from an exact baseline only by rounding."""
    quality = group.find("quality")
    return bool(group.exact) if group.baseline else quality is not None and quality.outcome == "exact"
