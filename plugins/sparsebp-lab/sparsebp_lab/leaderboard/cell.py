"""Train cells of a submission again: the checker draws them at random and compares them with the archive.

The same code on the same kind of machine gives bit-identical results. Elsewhere rounding differs, and training
amplifies it. The check allows a quarter of the standard deviation over seeds, less than any statement needs. See
decision 39.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run.metric import EVAL_LOSS, TEST_LOSS
from sparsebp_lab.leaderboard.check import ArchivedRun
from sparsebp_lab.study.course import Course
from sparsebp_lab.study.extension import plan_extended
from sparsebp_lab.study.loader import LoadedStudy
from sparsebp_lab.study.record import StudyRecord
from sparsebp_lab.study.store import TrialStore
from sparsebp_lab.study.trial import StudyTrial, TrialMaker

ALLOWED = 0.25  # in standard deviations of a run over seeds
COMPARED = (TEST_LOSS.name, EVAL_LOSS.name)  # only report runs have the test split


@dataclass(frozen=True)
class TaskCell:
    """A trial that is trained again."""

    trial: StudyTrial  # with this machine's paths
    archived: ArchivedRun

    @property
    def recipe(self) -> Recipe:
        """What is trained."""
        return self.trial.recipe


@dataclass(frozen=True)
class CellResult:
    """A cell with its archived and its new result."""

    arm: str
    combination: str
    seed: int
    metric: str
    archived: float
    again: float | None  # None: it did not finish
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether both are equal within the allowed difference."""
        return self.again is not None and (
            self.again == self.archived or abs(self.again - self.archived) <= self.tolerance
        )

    def describe(self) -> str:
        """Return the comparison in one line."""
        name = " ".join(filter(None, (self.arm, self.combination, f"seed {self.seed}")))
        if self.again is None:
            return f"{name}: did not finish again; the archive has {self.metric} {self.archived:.6f}"
        how = "the same bits" if self.again == self.archived else f"allowed {self.tolerance:.4g}"
        return f"{name}: {self.metric} {self.again:.6f}, in the archive {self.archived:.6f} ({how})"


def draw_cells(
    mine: LoadedStudy, record: StudyRecord, archive: Path, runs: Sequence[ArchivedRun], number: int
) -> list[TaskCell]:
    """Return ``number`` finished trials of tuning and report, drawn anew by each check. If the draw depended on the
    archive, a submitter could change a harmless file until the draw suits them."""
    known = {one.trial.run_id: one for one in runs if one.loaded.finished}
    store = TrialStore(TrialMaker(record.study, mine.folders, record.generation), archive)
    course = _plan(mine, record, store)
    pairs = {store.find(trial).run_id: trial for trial in (*course.tuning, *course.report)}
    cells = [TaskCell(trial, known[run_id]) for run_id, trial in sorted(pairs.items()) if run_id in known]
    return random.SystemRandom().sample(cells, min(number, len(cells)))


def _plan(mine: LoadedStudy, record: StudyRecord, store: TrialStore) -> Course:
    return plan_extended(mine, TrialMaker(record.study, mine.folders, record.generation), store)[1]


def compare_cell(cell: TaskCell, again: LoadedRun | None, runs: Sequence[ArchivedRun]) -> CellResult:
    """Return a cell with its repetition; the spread of the archived runs gives the allowed difference."""
    metric, value = read_result(cell.archived.loaded)
    found = None if again is None or not again.finished else read_result(again)[1]
    spread = pooled_spread(runs, metric)
    trial = cell.archived.trial
    return CellResult(trial.arm, trial.combination, trial.seed, metric, value, found, ALLOWED * spread)


def read_result(run: LoadedRun) -> tuple[str, float]:
    """Return the name and the last value of the metric that a run is compared by."""
    for name in COMPARED:
        if values := run.evaluations(name):
            return name, values[-1]
    return COMPARED[-1], math.nan


def pooled_spread(runs: Sequence[ArchivedRun], metric: str) -> float:
    """Return the standard deviation of a run over seeds, pooled over all combinations; 0 if no seed was repeated."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for one in runs:
        values = one.loaded.evaluations(metric)
        if one.loaded.finished and values and math.isfinite(values[-1]):
            groups.setdefault((one.trial.role, one.trial.arm, one.trial.combination), []).append(values[-1])
    return _pool(groups)


def _pool(groups: Mapping[tuple[str, ...], Sequence[float]]) -> float:
    repeated = [values for values in groups.values() if len(values) > 1]
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in repeated)
    freedom = sum(len(values) - 1 for values in repeated)
    return math.sqrt(squares / freedom) if freedom else 0.0
