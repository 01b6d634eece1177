"""The runs of a study that are compared, and those that tuned its arms: these are listed and are in no interval."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.errors import RunNotFoundError
from sparsebp_cli.run import RunFolder, home
from sparsebp_cli.run.metric import EVAL_ACCURACY, EVAL_LOSS
from sparsebp_cli.study.store import Listed, StudyRecord


@dataclass(frozen=True)
class TunedLine:
    """One combination of an arm."""

    arm: str
    combination: str
    seeds: tuple[int, ...]  # those of its runs that finished
    metric: str
    value: float | None  # mean over these seeds; None without one
    is_chosen: bool
    is_pruned: bool = False  # whether halving ended it before its last step


@dataclass(frozen=True)
class StudySelection:
    """What a comparison of a study reads."""

    runs: tuple[LoadedRun, ...]  # of report and controls, each under the name of its arm
    tuning: tuple[TunedLine, ...]
    warnings: tuple[str, ...]


def select(record: StudyRecord) -> StudySelection:
    """Read the runs of a study. Raise RunNotFoundError if none of its report has begun."""
    compared = [trial for trial in record.trials if trial.role in {"report", "control"}]
    found = [(trial, run) for trial in compared if (run := _load(trial)) is not None]
    if not found:
        raise RunNotFoundError(
            f"study {record.study} has no report yet; `sparsebp study {record.file}` goes on with it"
        )
    absent = len(compared) - len(found)
    warnings = [f"{absent} trials of the report have no run yet"] if absent else []
    chosen = {(trial.arm, trial.combination) for trial in compared}
    combinations: dict[tuple[str, str], list[Listed]] = {}
    for trial in record.trials:
        if trial.role == "tune":
            combinations.setdefault((trial.arm, trial.combination), []).append(trial)
    tuning = [_describe(some, is_chosen=key in chosen) for key, some in combinations.items()]
    return StudySelection(tuple(replace(run, name=trial.arm) for trial, run in found), tuple(tuning), tuple(warnings))


def _describe(trials: Sequence[Listed], *, is_chosen: bool) -> TunedLine:
    runs = [run for trial in trials if (run := _load(trial)) is not None and run.finished]
    is_scored = any(run.flat.get("dataset.format") == "classification" for run in runs)
    metric = (EVAL_ACCURACY if is_scored else EVAL_LOSS).name
    values = [value for run in runs for value in run.evaluations(metric)[-1:]]
    seeds = tuple(run.seed for run in runs if run.seed is not None)
    mean = statistics.fmean(values) if values else None
    return TunedLine(
        trials[0].arm, trials[0].combination, seeds, metric, mean, is_chosen, any(trial.pruned for trial in trials)
    )


def _load(trial: Listed) -> LoadedRun | None:
    try:
        return load_folder(RunFolder(home() / "runs" / trial.run_id))
    except RunNotFoundError:
        return None
