"""Several runs in one command: dense ones beside sparse ones, in an order that is fair to both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from sparsebp_cli.plan import Plan

MakePlans = Callable[[Sequence[Path], Sequence[str], "str | None"], "list[Plan]"]


def add_baselines(
    plans: Sequence[Plan], make_plans: MakePlans, recipes: Sequence[Path], changes: Sequence[str]
) -> list[Plan]:
    """Put beside each plan the dense one of the same recipe and seed, and interleave the two.

    A machine drifts: it grows warm, others use it. So dense and sparse take turns, and who is first changes each time.

    Args:
        plans: All seeds of the first recipe, then those of the second.
        make_plans: Makes plans of recipes, changes and seeds.
        recipes: Their files.
        changes: Made to each.

    Returns:
        The plans and their baselines, one baseline for all that share it.

    Raises:
        UsageError: Every plan is dense already.
    """
    num_seeds = len(plans) // len(recipes)
    ordered: list[Plan] = []
    known = {(plan.group, plan.recipe.training.seed) for plan in plans}
    for number, plan in enumerate(plans):
        file = recipes[number // num_seeds]
        dense_changes = [*changes, "policy=dense", f"name={_name_dense(plan.recipe.name)}"]
        (dense,) = make_plans([file], dense_changes, str(plan.recipe.training.seed))
        key = (dense.group, dense.recipe.training.seed)
        if key in known:
            ordered.append(plan)
            continue
        known.add(key)
        ordered += [dense, plan] if len(ordered) % 4 == 0 else [plan, dense]
    if len(ordered) == len(plans):
        raise UsageError("--with-baseline: every recipe is dense or has its dense one beside it already")
    times = sorted(plan.created for plan in ordered)  # runs are listed in the order in which they go
    return [plan.model_copy(update={"created": time}) for plan, time in zip(ordered, times, strict=True)]


def check_sweep(max_parallel: int, *, with_baseline: bool) -> None:
    """Refuse what would make a comparison unfair.

    Args:
        max_parallel: Runs at once.
        with_baseline: Whether dense and sparse are interleaved.

    Raises:
        UsageError: Both are asked for.
    """
    if with_baseline and max_parallel > 1:
        raise UsageError("--with-baseline interleaves on one device, one run at a time; it takes no --max-parallel")


def _name_dense(name: str) -> str:
    return f"{name[:58]}-dense"
