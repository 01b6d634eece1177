"""Summarise a study: for each arm its trials by stage, the best combination so far, and the time left."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run.metric import STEP_SECONDS, TRAIN_LOSS
from sparsebp_lab.study.course import Course, Tuned
from sparsebp_lab.study.decisive import find_decisive
from sparsebp_lab.study.disk import DiskUse
from sparsebp_lab.study.driver import Status
from sparsebp_lab.study.loader import LoadedStudy
from sparsebp_lab.study.store import TrialStore
from sparsebp_lab.study.trial import StudyTrial, with_steps

RUNS_TIMED = 3  # runs of each arm that the time estimate reads


@dataclass
class ArmLine:
    """One arm."""

    arm: str
    steps: str = ""  # optimizer steps, or their range over the combinations; empty before a rehearsal
    total: Counter[str] = field(default_factory=Counter)  # trials by stage, including those not known yet
    done: Counter[str] = field(default_factory=Counter)
    statuses: Counter[Status] = field(default_factory=Counter)
    best: str = ""  # best validation metric and its combination
    seconds_left: float | None = 0.0  # if trials run one after the other; None if an arm was never timed
    bytes_left: float | None = 0.0  # disk of the runs still to be made; None if no run has finished

    @property
    def num_trials(self) -> int:
        """All trials of the arm."""
        return sum(self.total.values())

    @property
    def num_done(self) -> int:
        return sum(self.done.values())


def summarise(
    loaded: LoadedStudy,
    course: Course,
    controls: Sequence[StudyTrial],
    statuses: Mapping[str, Status],
    store: TrialStore,
) -> list[ArmLine]:
    """Return one line for each arm, and one for the controls if there are any. ``statuses`` has the known states by run
    id; other trials wait."""
    lines = {arm: ArmLine(arm) for arm in loaded.study.arms}
    paces = {arm: _time_steps(arm, course, statuses, store) for arm in lines}
    disk = {arm: _measure_arm(arm, course, statuses, store) for arm in lines}
    steps: dict[str, set[int]] = {}
    whole: dict[str, list[float | None]] = {}  # seconds of each arm's trials from first to last step
    for trial in (*course.trials, *controls):
        line = lines.setdefault(trial.arm, ArmLine(trial.arm))
        status = statuses.get(trial.run_id, Status.WAITING)
        line.total[trial.role] += 1
        line.done[trial.role] += status in {Status.FINISHED, Status.DIVERGED, Status.PRUNED}
        line.statuses[status] += 1
        if trial.role != "rehearse":
            steps.setdefault(trial.arm, set()).add(trial.steps)
            whole.setdefault(trial.arm, []).append(_predict(paces.get(trial.arm), trial.recipe, trial.steps))
        if not status.over:
            line.seconds_left = _add(
                line.seconds_left, _predict(paces.get(trial.arm), trial.recipe, trial.stop_at or trial.steps)
            )
            line.bytes_left = _add_bytes(line.bytes_left, disk.get(trial.arm), trial.recipe, 1)
    for arm in loaded.study.arms:
        first = loaded.firsts[arm].recipe
        whole.setdefault(arm, [_predict(paces[arm], first, first.training.max_steps)])
    typical = {arm: _mean(some) for arm, some in whole.items()}
    _add_unknown(loaded, course, lines, typical, disk, steps)
    for arm, some in steps.items():
        lines[arm].steps = f"{min(some)}" if len(some) == 1 else f"{min(some)}-{max(some)}"
    for arm, line in lines.items():
        line.best = _describe_best([one for one in course.tuned if one.variant.arm == arm])
    return list(lines.values())


def _add_unknown(
    loaded: LoadedStudy,
    course: Course,
    lines: Mapping[str, ArmLine],
    typical: Mapping[str, float | None],
    disk: Mapping[str, DiskUse | None],
    steps: Mapping[str, set[int]],
) -> None:
    """Count the trials of later stages, which wait for the results of earlier ones."""
    for arm, num in (course.missing_of(loaded)).items():
        for stage, count in num.items():
            lines[arm].total[stage] += count
            lines[arm].statuses[Status.WAITING] += count
            first = loaded.firsts[arm].recipe
            most = max(steps.get(arm) or {first.training.max_steps})
            if count:
                lines[arm].seconds_left = _add(lines[arm].seconds_left, typical[arm], count)
                lines[arm].bytes_left = _add_bytes(lines[arm].bytes_left, disk[arm], with_steps(first, most), count)


def _add(total: float | None, seconds: float | None, number: int = 1) -> float | None:
    return None if total is None or seconds is None else total + number * seconds


def _mean(seconds: Sequence[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return statistics.fmean(known) if len(known) == len(seconds) else None


def _predict(paces: Mapping[int, float] | None, recipe: Recipe, steps: int) -> float | None:
    """Return the seconds of ``steps`` steps of a recipe, by the pace of its arm's batch size. An untimed batch size
    scales the nearest timed one; None if none was timed."""
    if not paces:
        return None
    batch = recipe.training.per_device_train_batch_size
    near = min(paces, key=lambda other: max(other / batch, batch / other))
    return steps * paces[near] * batch / near


def _add_bytes(total: float | None, use: DiskUse | None, recipe: Recipe, count: int) -> float | None:
    return None if total is None or use is None else total + count * use.predict(recipe)


def _measure_arm(arm: str, course: Course, statuses: Mapping[str, Status], store: TrialStore) -> DiskUse | None:
    """Measure a finished run of an arm, preferably a whole one instead of a rehearsal."""
    done = [t for t in course.trials if t.arm == arm and statuses.get(t.run_id) is Status.FINISHED]
    whole = [trial for trial in done if trial.role != "rehearse"] or done
    return store.measure(whole[0]) if whole else None


def _time_steps(arm: str, course: Course, statuses: Mapping[str, Status], store: TrialStore) -> Mapping[int, float]:
    """Return the seconds of an arm's step by batch size, evaluations included, from finished runs."""
    done = [t for t in course.trials if t.arm == arm and statuses.get(t.run_id) is Status.FINISHED]
    whole = [trial for trial in done if trial.role != "rehearse"]
    pace = _pace if whole else _pace_of_steps
    batches: dict[int, list[StudyTrial]] = {}
    for trial in whole or done:
        batches.setdefault(trial.recipe.training.per_device_train_batch_size, []).append(trial)
    found: dict[int, float] = {}
    for batch, some in batches.items():
        runs = [store.load(trial) for trial in some[:RUNS_TIMED]]
        if known := [seconds for run in runs if run is not None and (seconds := pace(run)) is not None]:
            found[batch] = statistics.median(known)
    return found


def _pace_of_steps(run: LoadedRun) -> float | None:
    """Return the median of the steps only, because probes take most of a rehearsal's time."""
    steps = [seconds for _, seconds in run.history.metrics.get(STEP_SECONDS.name, {}).values()]
    return statistics.median(steps) if steps else None


def _pace(run: LoadedRun) -> float | None:
    if len(run.history.warm) > 1:  # the time between its attempts was no training
        return _pace_of_steps(run)
    times = [time for time, _ in run.history.metrics.get(TRAIN_LOSS.name, {}).values()]
    return (max(times) - min(times)) / (len(times) - 1) if len(times) > 1 else None


def _describe_best(tuned: Sequence[Tuned]) -> str:
    known = [one for one in tuned if one.value is not None and not one.diverged]
    if not known:
        return "diverged" if tuned and all(one.diverged for one in tuned) else ""
    metric = find_decisive(known[0].variant.recipe)
    sign = -1.0 if metric.better == "higher" else 1.0
    best = min(known, key=lambda one: sign * (one.value or 0.0))
    return f"{best.value:.4f} {best.variant.label}"
