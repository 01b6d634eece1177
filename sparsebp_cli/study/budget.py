"""The steps of each arm: as many, or as many as pay for the same cost, time or tokens.

What a step costs is measured by a rehearsal, a run of ten steps whose probes take arm and dense in turn on one batch.
It is made once and kept, so the steps of a study do not change while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from sparsebp_cli.compare.cost import find_step_cost
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run.metric import STEP_SECONDS, TRAIN_TOKENS
from sparsebp_cli.study.loader import ArmVariant, LoadedStudy
from sparsebp_cli.study.schema import FEWEST_STEPS, BudgetSection
from sparsebp_cli.study.store import TrialStore
from sparsebp_cli.study.trial import REHEARSED_STEPS, StudyTrial, TrialMaker, rehearse

Steps = Mapping[int, int]  # position of a variant in the study to its optimizer steps; without those not known yet


@dataclass(frozen=True)
class StepPrice:
    """What a step takes of the budget."""

    amount: float  # dense examples' worth of work, seconds, or tokens
    noun: str = ""  # the unit, as an error names it; empty where only ratios have a meaning


def make_rehearsals(loaded: LoadedStudy, maker: TrialMaker) -> dict[int, StudyTrial]:
    """Return the rehearsal of each variant, by its position; combinations that cost the same share one. Empty where the
    budget needs none. Raise UsageError for a schedule, whose cost a rehearsal does not tell."""
    if loaded.study.budget is None or loaded.study.budget.same == "steps":
        return {}
    found = {}
    for position, variant in enumerate(loaded.variants):
        if variant.recipe.schedule is not None and loaded.study.budget.same != "tokens":
            raise UsageError(
                f"arm {variant.arm}: the steps of its schedule do not cost alike, and a rehearsal of {REHEARSED_STEPS} "
                "steps does not tell the share of each phase; use budget: {same: steps}, or tokens"
            )
        first = loaded.firsts[variant.arm]
        (found[position],) = maker.make("rehearse", variant.arm, "", rehearse(variant.recipe, first.recipe), [0])
    return found


def find_steps(loaded: LoadedStudy, rehearsals: Mapping[int, StudyTrial], store: TrialStore) -> Steps:
    """Return the steps of each variant; variants whose rehearsal has not finished are left out. Raise UsageError for an
    arm that gets too few steps, or whose cost its rehearsal does not tell."""
    budget, variants = loaded.study.budget, loaded.variants
    if budget is None:
        return {position: variant.recipe.training.max_steps for position, variant in enumerate(variants)}
    if budget.same == "steps":
        return {
            position: budget.steps or variant.recipe.training.max_steps for position, variant in enumerate(variants)
        }
    prices = {position: _measure(variants[position], trial, store, budget) for position, trial in rehearsals.items()}
    payer, paid = None, 0
    if budget.as_arm is not None:
        own = [position for position, variant in enumerate(variants) if variant.arm == budget.as_arm]
        payer, paid = prices[own[0]] if own else None, budget.steps or _steps_of(loaded, budget.as_arm)
        if payer is None:
            return {}
    return {
        position: share_budget(paid, payer, price, variants[position], budget)
        for position, price in prices.items()
        if price is not None
    }


def _steps_of(loaded: LoadedStudy, arm: str) -> int:
    return loaded.firsts[arm].recipe.training.max_steps


def share_budget(
    steps: int, payer: StepPrice | None, price: StepPrice, variant: ArmVariant, budget: BudgetSection
) -> int:
    """Return how many steps at a price the payer's steps pay for, or the budget's seconds or tokens without a payer;
    rounded down, so that an arm never gets more. Raise UsageError if these are fewer than ten."""
    amount = budget.amount if payer is None else steps * payer.amount
    assert amount is not None
    found = math.floor(amount / price.amount + 1e-9)
    if found >= FEWEST_STEPS:
        return found
    if payer is None:
        pays, each = f"{amount:g} {price.noun}", f"{price.amount:.3g} {price.noun}"
    else:
        pays, each = f"{steps} steps of {budget.as_arm}", f"{price.amount / payer.amount:.2f}"
    key = "budget.steps" if payer is not None else "budget.seconds" if budget.tokens is None else "budget.tokens"
    raise UsageError(
        f"arm {variant.arm}: {pays} pay for {found} of its steps, which cost {each} each; a budget under "
        f"{FEWEST_STEPS} steps is refused: raise {key}"
    )


def _measure(variant: ArmVariant, trial: StudyTrial, store: TrialStore, budget: BudgetSection) -> StepPrice | None:
    run = store.load(trial)
    if run is None or not run.finished:
        return None
    price, lacks = read_price(run, budget)
    if price is None:
        raise UsageError(
            f"arm {variant.arm}: its rehearsal {run.run_id} has {lacks}, so its cost is not known; "
            "use budget: {same: steps}"
        )
    return price


def read_price(run: LoadedRun, budget: BudgetSection) -> tuple[StepPrice | None, str]:
    """Return what a step of a rehearsal costs in the budget's currency, and what the run lacks if it does not tell."""
    match budget.same:
        case "time":
            seconds = run.values(STEP_SECONDS.name, after_warmup=True)
            return (StepPrice(median(seconds), "seconds") if seconds else None), "no step times"
        case "tokens":
            seen = run.series(TRAIN_TOKENS.name)
            return (StepPrice(max(seen.values()) / max(seen), "tokens") if seen else None), "no count of tokens"
    cost = find_step_cost([run])
    return (None if cost is None else StepPrice(cost.units)), "neither probes nor counts"
