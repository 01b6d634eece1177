"""Several runs in one command: interleaves dense and sparse runs in an order that is fair to both."""

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
    """Add the dense plan of the same recipe and seed to each plan, and interleave the two.

    A machine drifts: it gets warm, and others use it. So dense and sparse alternate, and the first of a pair changes
    each time. ``plans`` are all seeds of the first recipe, then those of the second; plans with the same baseline share
    it. Raises ``UsageError`` if every plan is dense already.
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
        raise UsageError("--with-baseline: every recipe is dense or already has its dense counterpart")
    times = sorted(plan.created for plan in ordered)  # runs are listed by creation time: keep it their order of start
    return [plan.model_copy(update={"created": time}) for plan, time in zip(ordered, times, strict=True)]


def check_sweep(max_parallel: int, *, with_baseline: bool) -> None:
    """Raise ``UsageError`` for parallel runs with interleaved baselines, which would make step times unfair."""
    if with_baseline and max_parallel > 1:
        raise UsageError("--with-baseline interleaves on one device, one run at a time; it takes no --max-parallel")


def _name_dense(name: str) -> str:
    return f"{name[:58]}-dense"
