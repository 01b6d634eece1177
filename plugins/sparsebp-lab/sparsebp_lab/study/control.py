"""Plan the controls that a study lacks: those that its report's comparison names as missing, as trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsebp_cli.compare import LoadedRun, compare_runs
from sparsebp_cli.compare.comparison import ControlRuns, Kind
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe import load_stored
from sparsebp_cli.run import RunFolder, home
from sparsebp_lab.study.course import Course
from sparsebp_lab.study.loader import LoadedStudy
from sparsebp_lab.study.store import TrialStore
from sparsebp_lab.study.trial import StudyTrial, TrialMaker

KINDS: tuple[Kind, ...] = ("random", "fewer_steps", "smaller_batch")


def plan_controls(loaded: LoadedStudy, course: Course, maker: TrialMaker, store: TrialStore) -> list[StudyTrial]:
    """Return the trials of all controls known so far; none before the report is complete. The controls of one arm may
    serve the next arm, so the next arm's controls are known when they have finished."""
    if loaded.study.controls == "none" or len({trial.arm for trial in course.report}) < len(loaded.study.arms):
        return []
    runs = load_named(course.report, store)
    trials: list[StudyTrial] = []
    for arm in loaded.study.arms:
        if not all(store.is_done(trial) for trial in (*course.report, *trials)):
            break
        runs = load_named([*course.report, *trials], store)
        found = compare_runs(runs).controls
        missing = [c.runs for c in found if c.label == arm and c.kind in KINDS and c.runs is not None]
        for runs_of_one in dict.fromkeys(missing):
            trials += _make(runs_of_one, maker)
    return trials


def load_named(trials: Sequence[StudyTrial], store: TrialStore) -> list[LoadedRun]:
    """Read the runs of trials, each under the name of its arm."""
    pairs = [(trial, store.load(trial)) for trial in trials]
    return [replace(run, name=trial.arm) for trial, run in pairs if run is not None]


def _make(runs: ControlRuns, maker: TrialMaker) -> list[StudyTrial]:
    stored = Plan.load(RunFolder(home() / "runs" / runs.like).plan_file).recipe
    changes = [*runs.changes, f"name={runs.name}"]
    recipe = load_stored(stored.model_dump(mode="json"), runs.like, changes).recipe
    return maker.make("control", runs.name, "", recipe, runs.seeds)
