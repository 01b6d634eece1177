"""Extend a grid whose best value lies at its edge, for every arm, until the best value is inside.

Each side of a key gets at most ``search.extend`` more values, each by the factor between its last two. All arms get
them, so all have equally many trials over the same values. Nothing is stored: the rule is applied to the results again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from sparsebp_cli.errors import RecipeError
from sparsebp_lab.study.course import Course, Tuned, choose_best, plan_course
from sparsebp_lab.study.loader import ArmVariant, Combination, LoadedStudy
from sparsebp_lab.study.store import TrialStore
from sparsebp_lab.study.trial import TrialMaker

DIGITS = 4  # digits of a new value


def plan_extended(loaded: LoadedStudy, maker: TrialMaker, store: TrialStore) -> tuple[LoadedStudy, Course, list[str]]:
    """Derive every trial known so far, with all values that edges require. Return the extended study, its course, and
    texts about the edges that remain."""
    course, edges = plan_course(loaded, maker, store), list[str]()
    known: Sequence[ArmVariant] = ()
    # One pass for each value that earlier commands have added, because nothing is stored.
    while known != loaded.variants:
        known = loaded.variants
        loaded, edges = extend(loaded, course.tuned)
        course = plan_course(loaded, maker, store)
    return loaded, course, edges


def extend(loaded: LoadedStudy, tuned: Sequence[Tuned]) -> tuple[LoadedStudy, list[str]]:
    """Return the study with one more value at each edge that an arm has chosen, and texts about the edges that remain.

    The study is unchanged if results are missing, if all choices are inside, or if the keys are not numbers. Halving,
    and searches that propose values themselves, do not extend grids.
    """
    best = choose_best(tuned)
    arms = [arm for arm in loaded.study.arms if arm not in loaded.study.shares]
    if loaded.study.search.kind != "grid" or any(arm not in best for arm in arms):
        return loaded, []
    grid = find_grid(loaded)
    added: dict[str, list[object]] = {}
    stays = []
    for key, values in grid.items():
        given = loaded.study.vary[key]
        numbers = sorted(value for value in values if isinstance(value, int | float) and not isinstance(value, bool))
        # New values differ by a factor, which does not work from 0 or below.
        if not isinstance(given, list) or len(numbers) < max(2, len(values)) or numbers[0] <= 0:
            continue
        chosen = {arm: dict(best[arm].combination)[key] for arm in arms}
        for edge, inner, name in ((numbers[0], numbers[1], "least"), (numbers[-1], numbers[-2], "largest")):
            at = [arm for arm in arms if chosen[arm] == edge]
            limits = [value for value in given if isinstance(value, int | float)]
            more = sum(value < min(limits) if name == "least" else value > max(limits) for value in numbers)
            new = _next(edge, inner)
            if at and new is not None and more < loaded.study.search.extend:
                added.setdefault(key, []).append(new)
            elif at:
                at_edge = f"{', '.join(at)}: the best {key}={edge} is the {name} of its grid"
                stays.append(f"{at_edge} (extended {more}x)")
    if not added:
        return loaded, stays
    try:
        return _with(loaded, {key: [*values, *added.get(key, [])] for key, values in grid.items()}), stays
    except RecipeError as error:  # such as a batch size that no recipe allows
        return loaded, [*stays, f"the grid could not be extended: {error.text}"]


def find_grid(loaded: LoadedStudy) -> dict[str, list[object]]:
    """Return the sorted values that the variants have for each varied key."""
    found: dict[str, dict[str, object]] = {}
    for variant in loaded.variants:
        for key, value in variant.combination:
            found.setdefault(key, {}).setdefault(repr(value), value)
    return {key: [*values.values()] for key, values in found.items()}


def _next(edge: float, inner: float) -> float | None:
    """Return the value beyond an edge, whole numbers for whole numbers; None if there is none."""
    value = edge * (edge / inner)
    if isinstance(edge, int) and isinstance(inner, int):
        whole = round(value)
        return whole if whole >= 1 and whole != edge else None
    return float(f"{value:.{DIGITS}g}")


def _with(loaded: LoadedStudy, grid: Mapping[str, Sequence[object]]) -> LoadedStudy:
    combinations: list[Combination] = [
        tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
    ]
    return loaded.with_combinations(dict.fromkeys(loaded.study.arms, combinations))
