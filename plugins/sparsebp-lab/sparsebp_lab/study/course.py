"""Derive a study's stages: rehearse, tune, report, control. Each follows from the file and the stored runs.

Nothing is stored between commands. A study that was killed derives the same trials again and finds them finished.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.recipe import Recipe, with_stop
from sparsebp_cli.run.metric import Metric
from sparsebp_lab.study.budget import Steps, find_flops, find_steps, make_rehearsals
from sparsebp_lab.study.decisive import find_decisive
from sparsebp_lab.study.halving import find_rungs, halve
from sparsebp_lab.study.loader import ArmVariant, LoadedStudy
from sparsebp_lab.study.store import TrialStore
from sparsebp_lab.study.trial import StudyTrial, TrialMaker, with_budget, with_steps

WARMUP_KEY = "training.warmup_steps"


@dataclass(frozen=True)
class Tuned:
    """A variant after tuning."""

    variant: ArmVariant
    value: float | None  # mean validation metric over the tuning seeds; None if a trial has no result yet
    diverged: bool = False  # a trial's loss was not finite, so it cannot be chosen
    pruned: bool = False  # halving ended it, so it cannot be chosen
    is_dear: bool = False  # the budget pays for too few of its steps, so it is not tried


@dataclass(frozen=True)
class Course:
    """The trials of a study that are known so far. Later stages are empty until the earlier ones have results."""

    rehearsals: tuple[StudyTrial, ...] = ()
    tuning: tuple[StudyTrial, ...] = ()
    tuned: tuple[Tuned, ...] = ()
    best: dict[str, ArmVariant] = field(default_factory=dict)  # chosen combination by arm
    report: tuple[StudyTrial, ...] = ()

    @property
    def trials(self) -> tuple[StudyTrial, ...]:
        """All trials in the order in which they run; a trial of two stages counts for the later one."""
        found: dict[str, StudyTrial] = {}
        for trial in (*self.rehearsals, *self.tuning, *self.report):
            found[trial.run_id] = trial
        return tuple(found.values())

    def missing_of(self, loaded: LoadedStudy) -> dict[str, dict[str, int]]:
        """Return for each arm how many trials of each stage are not known yet."""
        seeds, found = loaded.study.seeds, {}
        for arm in loaded.study.arms:
            tunes = needs_tuning(loaded) and arm not in loaded.study.shares
            tried = count_combinations(loaded, arm) - sum(one.variant.arm == arm and one.is_dear for one in self.tuned)
            num_tune = tried * len(seeds.tune) if tunes else 0
            tuning, report = (sum(trial.arm == arm for trial in some) for some in (self.tuning, self.report))
            found[arm] = {"tune": num_tune - tuning, "report": 0 if report else len(seeds.report)}
        return found


def plan_course(loaded: LoadedStudy, maker: TrialMaker, store: TrialStore) -> Course:
    """Derive every trial that is known so far. Raise UsageError for an arm that exceeds its budget."""
    study = loaded.study
    rehearsals = make_rehearsals(loaded, maker, store)
    steps, flops = find_steps(loaded, rehearsals, store), find_flops(loaded, rehearsals, store)
    tuning, tuned = _tune(loaded, steps, flops, maker, store)
    counts = {arm: sum(one.variant.arm == arm for one in tuned) for arm in study.arms}
    best = {arm: one for arm, one in choose_best(tuned).items() if counts[arm] == count_combinations(loaded, arm)}
    for arm, source in study.shares.items():
        if source in best:
            label = best[source].label
            best[arm] = next(variant for variant in loaded.of_arm(arm) if variant.label == label)
    report: list[StudyTrial] = []
    for position, variant in enumerate(loaded.variants):
        if position in steps and best.get(variant.arm) is variant:
            recipe = lengthen(variant, steps[position], _own(loaded, variant, flops))
            report += maker.make_all("report", variant, recipe, study.seeds.report)
    unique = {trial.run_id: trial for some in rehearsals.values() for trial in some}
    return Course(tuple(unique.values()), tuple(tuning), tuple(tuned), best, tuple(report))


def lengthen(variant: ArmVariant, steps: int, flops: float | None) -> Recipe:
    """Return a variant's recipe over its steps, within its budget; a warm-up that is varied stays as it is."""
    fixed = any(key == WARMUP_KEY for key, _ in variant.combination)
    return with_budget(with_steps(variant.recipe, steps, fixed_warmup=fixed), flops)


def _own(loaded: LoadedStudy, variant: ArmVariant, flops: float | None) -> float | None:
    """Return the part of the budget's FLOPs that a variant may spend."""
    budget = loaded.study.budget
    return None if flops is None or budget is None else flops * budget.part_of(variant.arm)


def choose_best(tuned: Sequence[Tuned]) -> dict[str, ArmVariant]:
    """Return the best combination of each arm by the validation metric; ties go to the one with the better neighbours.
    An arm is missing if a trial has no result yet, which could be the best, or if it always diverged."""
    arms: dict[str, list[Tuned]] = {}
    for one in tuned:
        arms.setdefault(one.variant.arm, []).append(one)
    best = {}
    for arm, some in arms.items():
        sound = [one for one in some if not (one.diverged or one.pruned or one.is_dear)]
        if not sound or (len(some) > 1 and any(one.value is None for one in sound)):
            continue
        sign = -1.0 if find_decisive(sound[0].variant.recipe).better == "higher" else 1.0
        least = min(sign * (one.value or 0.0) for one in sound)
        equal = [one for one in sound if sign * (one.value or 0.0) == least]
        best[arm] = min(equal, key=lambda one: sign * _mean_of_neighbours(one, sound)).variant
    return best


def _mean_of_neighbours(one: Tuned, sound: Sequence[Tuned]) -> float:
    """Return the mean validation metric of the combinations that differ in one key by one place."""
    here = dict(one.variant.combination)
    found = []
    for key, value in here.items():
        line = [other for other in sound if _differs_in(dict(other.variant.combination), here) == [key]]
        values = {other.variant.combination: dict(other.variant.combination)[key] for other in line}
        numbers = {at: number for at, number in values.items() if isinstance(number, int | float)}
        if isinstance(value, int | float):
            below = [number for number in numbers.values() if number < value]
            above = [number for number in numbers.values() if number > value]
            near = {max(below, default=None), min(above, default=None)}
            found += [other.value for other in line if values[other.variant.combination] in near]
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known else one.value or 0.0


def _differs_in(one: dict[str, object], other: dict[str, object]) -> list[str]:
    return [key for key in one if one[key] != other.get(key)]


def read_value(run: LoadedRun | None, metric: Metric) -> float | None:
    """Return a finished run's validation metric after its last step; None without one."""
    if run is None or not run.finished:
        return None
    return next(iter(run.evaluations(metric.name)[-1:]), None)


def _tune(
    loaded: LoadedStudy, steps: Steps, flops: float | None, maker: TrialMaker, store: TrialStore
) -> tuple[list[StudyTrial], list[Tuned]]:
    """Make the tuning trials and read their results; without varied values there is nothing to choose."""
    if not needs_tuning(loaded):
        return [], [Tuned(variant, None) for variant in loaded.variants]
    if loaded.study.search.kind == "halving":
        return _tune_by_halving(loaded, steps, flops, maker, store)
    trials, tuned = [], []
    for position, variant in enumerate(loaded.variants):
        if variant.arm in loaded.study.shares:
            continue
        if position not in steps:
            tuned.append(Tuned(variant, None))
            continue
        if not steps[position]:
            tuned.append(Tuned(variant, None, is_dear=True))
            continue
        recipe = _set_test_aside(lengthen(variant, steps[position], _own(loaded, variant, flops)))
        some = maker.make_all("tune", variant, recipe, loaded.study.seeds.tune)
        trials += some
        tuned.append(_read_tuned(variant, [store.load(trial) for trial in some]))
    return trials, tuned


def _tune_by_halving(
    loaded: LoadedStudy, steps: Steps, flops: float | None, maker: TrialMaker, store: TrialStore
) -> tuple[list[StudyTrial], list[Tuned]]:
    """Make the tuning trials of each arm, each up to the rung that it may reach now."""
    trials: list[StudyTrial] = []
    tuned: list[Tuned] = []
    for arm in loaded.study.arms:
        places = [place for place, variant in enumerate(loaded.variants) if variant.arm == arm]
        if not all(place in steps for place in places):
            tuned += [Tuned(loaded.variants[place], None) for place in places]
            continue
        chosen = [(loaded.variants[place], steps[place]) for place in places]
        pairs = [(one, _set_test_aside(lengthen(one, count, _own(loaded, one, flops)))) for one, count in chosen]
        seeds = loaded.study.seeds.tune
        made = [_HalvedVariant(one, maker.make_all("tune", one, recipe, seeds), store) for one, recipe in pairs]
        reduction = loaded.study.search.reduction
        rungs = [find_rungs(recipe, len(places), reduction) for _, recipe in pairs]
        for halved, own in zip(made, rungs, strict=True):
            halved.rungs = own
        for standing in halve(made, min(map(len, rungs)), reduction, _HalvedVariant.measure):
            halved, cut = standing.item, standing.is_cut
            stop_at = None if standing.rung is None else halved.rungs[standing.rung]
            trials += [replace(one, recipe=with_stop(one.recipe, stop_at), is_cut=cut) for one in halved.trials]
            found = _read_tuned(halved.variant, [store.load(trial) for trial in halved.trials])
            tuned.append(replace(found, pruned=cut))
    return trials, tuned


def _set_test_aside(recipe: Recipe) -> Recipe:
    """Return the recipe of a tuning trial, which leaves out the test split."""
    return recipe.model_copy(update={"measure": recipe.measure.model_copy(update={"test": False})})


@dataclass
class _HalvedVariant:
    """A combination with its trials and the steps of its rungs."""

    variant: ArmVariant
    trials: Sequence[StudyTrial]  # one for each tuning seed
    store: TrialStore
    rungs: Sequence[int] = ()

    def measure(self, rung: int) -> float | None:
        """Return the mean of the validation metric at a rung, lower being better; infinite if a run diverged, None if a
        run has not reached it."""
        metric, values = find_decisive(self.variant.recipe), []
        for run in map(self.store.load, self.trials):
            if run is not None and run.broke_down:
                return math.inf
            value = None if run is None else run.series(metric.name).get(self.rungs[rung])
            if value is None:
                return None
            values.append(value)
        mean = statistics.fmean(values)
        if not math.isfinite(mean):
            return math.inf
        return -mean if metric.better == "higher" else mean


def _read_tuned(variant: ArmVariant, runs: Sequence[LoadedRun | None]) -> Tuned:
    metric = find_decisive(variant.recipe)
    if any(run is not None and run.broke_down for run in runs):
        return Tuned(variant, None, diverged=True)
    values = [read_value(run, metric) for run in runs]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return Tuned(variant, None)
    mean = statistics.fmean(known)
    return Tuned(variant, mean, diverged=not math.isfinite(mean))


def needs_tuning(loaded: LoadedStudy) -> bool:
    """Return whether an arm has more than one combination."""
    return any(count_combinations(loaded, arm) > 1 for arm in loaded.study.arms)


def count_combinations(loaded: LoadedStudy, arm: str) -> int:
    """Return the final number of combinations of an arm."""
    return loaded.study.search.trials or len(loaded.of_arm(arm))
