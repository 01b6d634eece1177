"""Compute the steps of each arm: the same number for all, or as many as cost the same FLOPs, time or tokens.

A rehearsal, a short run whose steps are counted, measures the cost of a step; see :mod:`sparsebp_cli.worker.price`. If
its batches differ so much that the mean is not known within 2 %, a rehearsal of twice as many steps follows. A
rehearsal is never longer than the arm's own training, whose batches vary as much. Rehearsals run once and are kept, so
a study's steps do not change while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.statistics import quantile_t
from sparsebp_cli.errors import UsageError
from sparsebp_cli.run.metric import DENSE_STEP_FLOPS, DENSE_UPDATE_FLOPS, STEP_FLOPS, STEP_SECONDS, TRAIN_TOKENS
from sparsebp_lab.study.loader import ArmVariant, LoadedStudy
from sparsebp_lab.study.schema import FEWEST_STEPS, BudgetSection
from sparsebp_lab.study.store import TrialStore
from sparsebp_lab.study.trial import REHEARSED_STEPS, StudyTrial, TrialMaker, rehearse

# See decision 22.
WITHIN = 0.02  # half of the 95% interval of a step's cost, relative to the cost
MOST_REHEARSED = 320  # largest number of rehearsed steps; after it the estimate is used as it is
Steps = Mapping[int, int]  # optimizer steps by position of the variant in the study; unknown ones are missing


@dataclass(frozen=True)
class ArmStepPrice:
    """The cost of a step in units of the budget."""

    amount: float  # FLOPs, seconds, or tokens
    noun: str = ""  # the unit, for error messages
    half_width: float = 0.0  # of the 95% interval of FLOPs, relative to them


Rehearsals = Mapping[int, Sequence[StudyTrial]]  # by position of the variant, the shortest first


def make_rehearsals(loaded: LoadedStudy, maker: TrialMaker, store: TrialStore) -> Rehearsals:
    """Return the rehearsals of each variant; combinations of equal cost share them. Empty if the budget needs none."""
    budget = loaded.study.budget
    if budget is None or budget.same == "steps":
        return {}
    found: dict[int, list[StudyTrial]] = {}
    payer = next((at for at, variant in enumerate(loaded.variants) if variant.arm == budget.as_arm), None)
    paid = 0.0  # FLOPs; until they are known, only the payer's rehearsal is made longer
    if payer is not None:
        num_paid = budget.steps or _steps_of(loaded, loaded.variants[payer].arm)
        found[payer] = [*_rehearse(loaded.variants[payer], loaded, maker, store, lambda _: num_paid)]
        price = _measure(loaded.variants[payer], found[payer][-1], store, budget)
        paid = 0.0 if price is None else num_paid * price.amount
    for position, variant in enumerate(loaded.variants):
        if position != payer:
            own = _count_steps(paid * budget.part_of(variant.arm))
            found[position] = [*_rehearse(variant, loaded, maker, store, own)]
    return dict(sorted(found.items()))


def _count_steps(amount: float) -> Callable[[ArmStepPrice], float]:
    """Return a function that maps the cost of a step to the number of steps that ``amount`` pays for."""
    return lambda price: amount / price.amount


def _rehearse(
    variant: ArmVariant,
    loaded: LoadedStudy,
    maker: TrialMaker,
    store: TrialStore,
    count_own: Callable[[ArmStepPrice], float],
) -> Iterator[StudyTrial]:
    """Yield a rehearsal, and a longer one after each that leaves the cost too uncertain, but none longer than the arm's
    own run, whose steps ``count_own`` returns."""
    first, steps, budget = loaded.firsts[variant.arm], REHEARSED_STEPS, loaded.study.budget
    assert budget is not None
    while True:
        # All arms use one seed, so their costs are ratios over the same batches. See decision 22.
        (trial,) = maker.make("rehearse", variant.arm, "", rehearse(variant.recipe, first.recipe, steps), [0])
        yield trial
        run = store.load(trial)
        price = None if run is None or not run.finished else read_price(run, budget)[0]
        # See decision 22.
        if price is None or price.half_width <= WITHIN or 2 * steps > min(MOST_REHEARSED, count_own(price)):
            return
        steps *= 2


def find_steps(loaded: LoadedStudy, rehearsals: Rehearsals, store: TrialStore) -> Steps:
    """Return the steps of each variant; variants whose rehearsal has not finished are missing. A value that was added
    to a grid has 0 steps if the budget pays for too few. Raise UsageError for such a value of the file, or if a
    rehearsal does not measure the cost."""
    budget, variants = loaded.study.budget, loaded.variants
    if budget is None:
        return {position: variant.recipe.training.max_steps for position, variant in enumerate(variants)}
    if budget.same == "steps":
        return {
            position: budget.steps or variant.recipe.training.max_steps for position, variant in enumerate(variants)
        }
    prices = find_prices(loaded, rehearsals, store)
    payer, paid = _find_payer(loaded, prices)
    if budget.as_arm is not None and payer is None:
        return {}
    found = {}
    for position, price in prices.items():
        if price is not None:
            try:
                found[position] = share_budget(paid, payer, price, variants[position], budget)
            except UsageError:
                if not _is_added(variants[position], loaded):
                    raise
                found[position] = 0
    return found


def _is_added(variant: ArmVariant, loaded: LoadedStudy) -> bool:
    """Return whether a variant has a value that is not in its file, because the edge of a grid added it."""
    given = loaded.study.vary
    return any(isinstance(given[key], list) and value not in given[key] for key, value in variant.combination)


def find_prices(loaded: LoadedStudy, rehearsals: Rehearsals, store: TrialStore) -> dict[int, ArmStepPrice | None]:
    """Return the cost of a step of each variant, from its last rehearsal; None if that has not finished."""
    budget = loaded.study.budget
    assert budget is not None
    return {at: _measure(loaded.variants[at], some[-1], store, budget) for at, some in rehearsals.items()}


def find_flops(loaded: LoadedStudy, rehearsals: Rehearsals, store: TrialStore) -> float | None:
    """Return the FLOPs of the whole budget; None if the budget has another unit, or is not known yet."""
    if loaded.study.budget is None or loaded.study.budget.same != "cost":
        return None
    payer, steps = _find_payer(loaded, find_prices(loaded, rehearsals, store))
    return None if payer is None else steps * payer.amount


def _find_payer(loaded: LoadedStudy, prices: Mapping[int, ArmStepPrice | None]) -> tuple[ArmStepPrice | None, int]:
    budget = loaded.study.budget
    if budget is None or budget.as_arm is None:
        return None, 0
    own = [position for position, variant in enumerate(loaded.variants) if variant.arm == budget.as_arm]
    return prices[own[0]] if own else None, budget.steps or _steps_of(loaded, budget.as_arm)


def _steps_of(loaded: LoadedStudy, arm: str) -> int:
    return loaded.firsts[arm].recipe.training.max_steps


def share_budget(
    steps: int, payer: ArmStepPrice | None, price: ArmStepPrice, variant: ArmVariant, budget: BudgetSection
) -> int:
    """Return how many steps of cost ``price`` the payer's steps pay for, or the budget's seconds or tokens without a
    payer; an arm may have a part of them. Rounded down, so that an arm never gets more. Raise UsageError for fewer than
    ten steps."""
    whole, part = budget.amount if payer is None else steps * payer.amount, budget.part_of(variant.arm)
    assert whole is not None
    amount = part * whole
    # The addend keeps rounding from reducing a whole number.
    found = math.floor(amount / price.amount + 1e-9)
    if found >= FEWEST_STEPS:
        return found
    if payer is None:
        pays, each = f"{amount:g} {price.noun}", f"{price.amount:.3g} {price.noun}"
    else:
        pays, each = f"{steps} steps of {budget.as_arm}", f"{price.amount / payer.amount:.2f} steps of {budget.as_arm}"
        pays = pays if part == 1.0 else f"{part:g} of {pays}"
    key = "budget.steps" if payer is not None else "budget.seconds" if budget.tokens is None else "budget.tokens"
    raise UsageError(
        f"arm {variant.arm}: the budget of {pays} allows only {found} steps of this arm, at {each} per step; an arm "
        f"needs at least {FEWEST_STEPS} steps: raise {key}"
    )


def _measure(variant: ArmVariant, trial: StudyTrial, store: TrialStore, budget: BudgetSection) -> ArmStepPrice | None:
    run = store.load(trial)
    if run is None or not run.finished:
        return None
    price, lacks = read_price(run, budget)
    if price is None:
        raise UsageError(
            f"arm {variant.arm}: run {run.run_id}, which measures the cost of a step, has {lacks}; use "
            "'budget: {same: steps}', which needs no cost"
        )
    return price


def read_price(run: LoadedRun, budget: BudgetSection) -> tuple[ArmStepPrice | None, str]:
    """Return the cost of a rehearsal's step in the budget's unit, or what the run lacks for it."""
    match budget.same:
        case "time":
            seconds = run.values(STEP_SECONDS.name, after_warmup=True)
            return (ArmStepPrice(median(seconds), "seconds") if seconds else None), "no step times"
        case "tokens":
            seen = run.series(TRAIN_TOKENS.name)
            return (ArmStepPrice(max(seen.values()) / max(seen), "tokens") if seen else None), "no count of tokens"
    return _read_flops(run), "no cost of its steps"


def _read_flops(run: LoadedRun) -> ArmStepPrice | None:
    """Return the mean cost of a step. The cost of a dense step follows from shapes alone, for many batches. So the
    result is their mean times the measured ratio of both costs, with the ratio's error."""
    flops, dense = (run.values(name.name) for name in (STEP_FLOPS, DENSE_STEP_FLOPS))
    if not flops or len(flops) != len(dense):
        return None
    ratio = fmean(flops) / fmean(dense)
    known = run.history.facts.get("dense_step_flops")
    if isinstance(known, int | float):
        known += fmean(run.values(DENSE_UPDATE_FLOPS.name))
        amount, errors = ratio * known, [one - ratio * other for one, other in zip(flops, dense, strict=True)]
    else:
        amount, errors = fmean(flops), [one - fmean(flops) for one in flops]
    if len(errors) < FEWEST_STEPS:
        return ArmStepPrice(amount, "FLOPs")
    half = quantile_t(0.975, len(errors) - 1) * stdev(errors) / math.sqrt(len(errors))
    return ArmStepPrice(amount, "FLOPs", half / fmean(flops))
