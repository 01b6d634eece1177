"""Compute the trade-off of quality and cost for each group, consistent with the statements.

Means over different seeds are not comparable: dense with three harder seeds looks worse than a policy that lost every
pair. So a group's quality is the baseline's mean plus its paired difference, its times and memory are the baseline's
times their paired ratio, and one group beats another over the seeds that both have. The main cost is in FLOPs, which
are valid on a busy machine too. Withheld numbers are unknown here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from sparsebp_cli.compare.comparison import Comparison, Group

# FLOPs of all steps over the baseline's; for a step the median seconds, and the most memory that it holds.
COSTS = ("cost", "step_seconds", "held_bytes")


@dataclass(frozen=True)
class Trade:
    """The quality and the costs of a group."""

    label: str  # label of the group
    # the baseline's mean plus the paired difference; the group's own mean if no seed is shared
    quality: float | None
    sd: float | None  # standard deviation over seeds
    costs: dict[str, float | None]  # by the names of ``COSTS``; None if not measured, or withheld
    beaten_by: tuple[str, ...]  # labels of groups that are nowhere worse and somewhere better, by these numbers alone
    is_paired: bool = True  # whether it shares seeds with the baseline; if not, it is not ranked against other groups


def find_costs(trades: list[Trade]) -> list[str]:
    """Return the costs that are known for any group, in the order of ``COSTS``."""
    return [cost for cost in COSTS if any(trade.costs[cost] is not None for trade in trades)]


def find_trades(comparison: Comparison, *costs: str) -> list[Trade]:
    """Return every group, in order, with its costs and the groups that beat it. ``costs`` are some of ``COSTS``; if
    empty, those known for any group. Without a known direction of the metric, nothing beats anything."""
    sign = {"lower": 1.0, "higher": -1.0, "": 0.0}[comparison.better]
    base = comparison.groups[0]
    seeds = {group.label: _by_seed(comparison, group) for group in comparison.groups}
    placed = {group.label: _place(group, base) for group in comparison.groups}
    exact = {group.label: _is_exact(group) for group in comparison.groups}
    counted = costs or find_costs(list(placed.values()))

    def beats(other: str, mine: str) -> bool:
        if not (placed[other].is_paired and placed[mine].is_paired) or not sign:
            return False
        shared = seeds[other].keys() & seeds[mine].keys()
        pairs = [(placed[other].costs[cost], placed[mine].costs[cost]) for cost in counted]
        if not shared or any(a is None or b is None for a, b in pairs):
            return False
        gains = [sign * fmean(seeds[mine][seed] - seeds[other][seed] for seed in sorted(shared))]
        if exact[mine] and exact[other]:
            gains = [0.0]  # the difference is rounding
        gains += [b - a for a, b in pairs if a is not None and b is not None]
        return all(gain >= 0.0 for gain in gains) and any(gain > 0.0 for gain in gains)

    return [
        replace(trade, beaten_by=tuple(other for other in placed if other != label and beats(other, label)))
        for label, trade in placed.items()
    ]


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
    return Trade(group.label, quality, own.sd if own else None, costs, (), is_paired)


def _is_exact(group: Group) -> bool:
    """Return whether the statements say that a group differs from an exact baseline only by rounding."""
    quality = group.find("quality")
    return bool(group.exact) if group.baseline else quality is not None and quality.outcome == "exact"


def _by_seed(comparison: Comparison, group: Group) -> Mapping[int, float]:
    return {
        run.seed: run.quality
        for run in comparison.runs
        if run.group == group.group and run.counts and run.quality is not None
    }
