"""Select the runs of a study for comparison; runs that only tuned are listed, but enter no interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsebp_cli.compare import Comparison
from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.errors import RunNotFoundError
from sparsebp_cli.run import RunFolder, State, home
from sparsebp_cli.run.metric import EVAL_ACCURACY, EVAL_LOSS, TEST_ACCURACY, TEST_LOSS
from sparsebp_lab.study.choice import FEWEST_SEEDS, find_choice_errors
from sparsebp_lab.study.published import Paper, hold_beside_comparison, make_grid
from sparsebp_lab.study.record import Listed, StudyRecord

ENOUGH_SEEDS = 3  # tuning seeds for statements on methods; benchmarks/tuning.py simulated three
OVER = (State.FINISHED, State.FAILED, State.CANCELLED)


@dataclass(frozen=True)
class TunedLine:
    """One combination of an arm."""

    arm: str
    combination: str
    seeds: tuple[int, ...]  # seeds of its finished runs
    metric: str
    value: float | None  # mean over these seeds; None without one
    is_chosen: bool
    is_pruned: bool = False  # halving ended it before its last step


@dataclass(frozen=True)
class StudySelection:
    """Runs and errors of a study for a comparison."""

    runs: tuple[LoadedRun, ...]  # of report and controls, each under its arm's name
    tuning: tuple[TunedLine, ...]
    warnings: tuple[str, ...]
    # By reported metric and arm, the standard error of what tuning chose.
    choice: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tuned_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by arm, the arms that tuned its values
    is_complete: bool = True  # every report run is over
    paper: Paper | None = None  # its numbers appear beside the measured ones

    @property
    def terms(self) -> dict[str, Any]:
        """The study's arguments of a comparison."""
        return {"choice": self.choice, "tuned_by": self.tuned_by, "is_complete": self.is_complete}

    def make_claims(self, comparison: Comparison) -> list[Grid]:
        """Return the table of the publication's numbers beside those of the comparison of these runs; none without a
        publication."""
        return [] if self.paper is None else [make_grid(hold_beside_comparison(self.paper, comparison, self.runs))]


@dataclass(frozen=True)
class _Runs:
    """The folder with the runs of a study's trials."""

    folder: Path

    def load(self, trial: Listed) -> LoadedRun | None:
        try:
            return load_folder(RunFolder(self.folder / trial.run_id))
        except RunNotFoundError:
            return None


def select(record: StudyRecord, place: Path | None = None) -> StudySelection:
    """Read the runs of a study from this machine, or from an archive's folder. Raise RunNotFoundError if no report run
    has begun."""
    runs_of = _Runs((place or home()) / "runs")
    compared = [trial for trial in record.trials if trial.role in {"report", "control"}]
    found = [(trial, run) for trial in compared if (run := runs_of.load(trial)) is not None]
    if not found:
        next_command = f"`sparsebp study {record.words}` continues it"
        raise RunNotFoundError(f"study {record.study} has no report yet; {next_command}")
    absent = len(compared) - len(found)
    warnings = [f"{absent} trials of the report have no run yet"] if absent else []
    chosen = {(trial.arm, trial.combination) for trial in compared}
    combinations: dict[tuple[str, str], list[Listed]] = {}
    for trial in record.trials:
        if trial.role == "tune":
            combinations.setdefault((trial.arm, trial.combination), []).append(trial)
    tuning = [_describe(some, runs_of, is_chosen=key in chosen) for key, some in combinations.items()]
    missing = [trial for trial, run in found if trial.role == "report" and run.state not in OVER]
    is_complete = not missing and not any(trial.role == "report" for trial in compared if runs_of.load(trial) is None)
    if not is_complete:
        warnings.append("compare judges quality only when all runs of the report have ended")
    if tuning and len({trial.seed for trial in record.trials if trial.role == "tune"}) < ENOUGH_SEEDS:
        warnings.append(
            f"tuned with fewer than {ENOUGH_SEEDS} seeds: results hold for these values, not for the methods"
        )
    runs = tuple(replace(run, name=trial.arm) for trial, run in found)
    if record.paper is not None and record.paper.scaled:
        other = ", ".join(record.paper.scaled)
        warnings.append(f"scaled: these runs do not test the claims of {record.paper.title}, because they have {other}")
    choice = _find_choice(combinations, runs_of)
    tuned_by = find_tuned_by(chosen, {arm for arm, _ in combinations})
    return StudySelection(runs, tuple(tuning), tuple(warnings), choice, tuned_by, is_complete, record.paper)


def find_tuned_by(reported: Set[tuple[str, str]], tuned: Set[str]) -> dict[str, tuple[str, ...]]:
    """Return which arms tuned the values that each arm is reported with. An arm that was not tuned shares another arm's
    values; the list of a study does not name it, so all arms with the same values count."""
    found = {}
    for arm, values in reported:
        same = sorted(other for other, theirs in reported if theirs == values and other in tuned)
        found[arm] = (arm,) if arm in tuned or not (values and same) else tuple(same)
    return found


# The validation counterpart of the reported metric; the deciding metric may be the accuracy.
REPORTED = {one.name: here.name for one, here in ((TEST_LOSS, EVAL_LOSS), (TEST_ACCURACY, EVAL_ACCURACY))}


def _find_choice(
    combinations: Mapping[tuple[str, str], Sequence[Listed]], runs_of: _Runs
) -> dict[str, dict[str, float]]:
    """Return the error of each arm's choice for each metric that may be reported; none with one tuning seed."""
    loaded = {key: [runs_of.load(trial) for trial in trials] for key, trials in combinations.items()}
    sound = {key: [run for run in runs if run is not None and run.finished] for key, runs in loaded.items()}
    whole = {key: runs for key, runs in sound.items() if len(runs) == len(combinations[key]) >= FEWEST_SEEDS}
    if not whole:
        return {}
    import numpy as np

    decisive, better = _find_decisive([run for runs in whole.values() for run in runs])
    sign = -1.0 if better == "higher" else 1.0
    found: dict[str, dict[str, float]] = {}
    reported_as = REPORTED | {decisive.replace("eval/", "test/", 1): decisive}
    for reported in (*reported_as, *reported_as.values()):
        name, by, values = reported_as.get(reported, reported), dict[str, list[Any]](), dict[str, list[Any]]()
        named = dict[str, list[str]]()
        for (arm, combination), runs in whole.items():
            last = [(run.evaluations(decisive)[-1:], run.evaluations(name)[-1:]) for run in runs]
            if all(one and other and math.isfinite(one[0] + other[0]) for one, other in last):
                named.setdefault(arm, []).append(combination)
                by.setdefault(arm, []).append([sign * one[0] for one, _ in last])
                values.setdefault(arm, []).append([other[0] for _, other in last])
        if by:
            by_arm, values_of_arm = ({arm: np.array(rows) for arm, rows in each.items()} for each in (by, values))
            found[reported] = find_choice_errors(by_arm, values_of_arm, named)
    return found


def _find_decisive(runs: Sequence[LoadedRun]) -> tuple[str, str]:
    """Return the validation metric that chose among the tuning runs, per their recipes, and its direction."""
    for run in runs:
        named = run.flat.get("measure.metric")
        if isinstance(named, str) and (known := run.history.find_metric(named)) is not None:
            return named, known.better
    is_scored = any(run.flat.get("dataset.format") == "classification" for run in runs)
    found = EVAL_ACCURACY if is_scored else EVAL_LOSS
    return found.name, found.better


def _describe(trials: Sequence[Listed], runs_of: _Runs, *, is_chosen: bool) -> TunedLine:
    runs = [run for trial in trials if (run := runs_of.load(trial)) is not None and run.finished]
    metric, _ = _find_decisive(runs)
    values = [value for run in runs for value in run.evaluations(metric)[-1:]]
    seeds = tuple(run.seed for run in runs)
    mean = statistics.fmean(values) if values else None
    return TunedLine(
        trials[0].arm, trials[0].combination, seeds, metric, mean, is_chosen, any(trial.pruned for trial in trials)
    )
