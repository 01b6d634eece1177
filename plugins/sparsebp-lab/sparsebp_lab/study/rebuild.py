"""Derive a study's choices again from an archive of its trials: costs, steps, added values and combinations.

The study's own file and rules apply. The archive has the trials and their list, ``studies/NAME.json``. A trial is found
by its recipe and seed, with names instead of paths, since code and machine may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsebp_cli.errors import RunNotFoundError, UsageError
from sparsebp_cli.run import RunFolder
from sparsebp_lab.study.course import Course
from sparsebp_lab.study.extension import plan_extended
from sparsebp_lab.study.loader import LoadedStudy
from sparsebp_lab.study.record import Listed, StudyRecord, digest_journal, find_archived
from sparsebp_lab.study.store import TrialStore, has_plan
from sparsebp_lab.study.trial import StudyTrial, TrialMaker


@dataclass(frozen=True)
class ArmChoice:
    """What an arm was reported with."""

    combination: str  # the varied values in one line; empty if nothing is varied
    steps: int

    def __str__(self) -> str:
        return f"{self.steps} steps{self.combination and f', {self.combination}'}"


@dataclass(frozen=True)
class RebuiltArm:
    """An arm's choice as derived from the archive, and as reported; None if there is none."""

    arm: str
    rebuilt: ArmChoice | None
    reported: ArmChoice | None

    def describe(self) -> str:
        """Return both in one line."""
        if self.rebuilt == self.reported:
            return f"{self.arm}: {self.reported or 'nothing is chosen yet'}, as the study chose"
        reported = "the study reported nothing" if self.reported is None else f"the study reported {self.reported}"
        return f"{self.arm}: {self.rebuilt or 'no choice follows from these trials'}; {reported}"


@dataclass(frozen=True)
class Rebuilt:
    """The choices of a study, rebuilt."""

    arms: tuple[RebuiltArm, ...]
    faults: tuple[str, ...]  # texts on trials that differ from the list or the rules
    edges: tuple[str, ...]  # texts on edges of grids that were not extended further
    num_trials: int

    @property
    def is_as_chosen(self) -> bool:
        """Whether every choice equals the reported one."""
        return not self.faults and all(arm.rebuilt == arm.reported for arm in self.arms)


def rebuild(loaded: LoadedStudy, archive: Path) -> Rebuilt:
    """Derive the choices of a study from the folder of an unpacked archive. Raise UsageError for an archive without the
    study, and for a search whose proposals depend on when its trials ended."""
    name = loaded.study.study
    if loaded.study.search.is_sampled:
        raise UsageError(
            f"{name}: --from supports only the searches grid and halving, got {loaded.study.search.kind}, whose "
            "choices depend on when its trials ended"
        )
    record = find_archived(name, archive)
    maker = TrialMaker(name, loaded.folders, record.generation)
    store = TrialStore(maker, archive)
    loaded, course, edges = plan_extended(loaded, maker, store)
    rebuilt = {one.arm: ArmChoice(one.combination, one.steps) for one in course.report}
    reported: dict[str, ArmChoice] = {}
    for one in record.trials:
        run = RunFolder(archive / "runs" / one.run_id)
        if one.role == "report" and has_plan(run):
            reported[one.arm] = ArmChoice(one.combination, run.read_plan()["recipe"]["training"]["max_steps"])
    arms = tuple(RebuiltArm(arm, rebuilt.get(arm), reported.get(arm)) for arm in loaded.study.arms)
    faults = (*_find_changed(record, archive), *_find_others(loaded, record, course, store))
    return Rebuilt(arms, faults, tuple(edges), len(record.trials))


def _find_changed(record: StudyRecord, archive: Path) -> Iterator[str]:
    """Yield texts on listed trials that are missing in the archive, or differ from what was archived."""
    for one in record.trials:
        run = RunFolder(archive / "runs" / one.run_id)
        try:
            if digest_journal(run) != record.digests.get(one.run_id):
                yield f"{_describe(one)}: the event log of run {one.run_id} is not the one that was archived"
        except (OSError, RunNotFoundError):
            yield f"{_describe(one)}: run {one.run_id} is not in the archive"


def _find_others(loaded: LoadedStudy, record: StudyRecord, course: Course, store: TrialStore) -> Iterator[str]:
    """Yield texts on trials that the rules require but the archive or the list lacks, trials that they do not require,
    and trials listed under another name: a comparison relies on the list."""
    needed = [*course.rehearsals, *course.tuning, *course.report]
    # Combinations of equal cost share a rehearsal, and an arm may be listed with another arm's training.
    asked: dict[tuple[str, str, str, str, int], StudyTrial] = {
        (store.find(trial).run_id, trial.role, trial.arm, trial.combination, trial.seed): trial for trial in needed
    }
    listed = [(one.run_id, one.role, one.arm, one.combination, one.seed) for one in record.trials]
    known = {run_id for run_id, *_ in asked}
    for key, trial in asked.items():
        if not has_plan(store.find(trial)):
            yield f"{_describe(trial)}: the study needs this trial, but the archive has no run for it"
        elif key not in listed:
            yield f"{_describe(trial)}: run {key[0]} is in the archive, but the list of trials has no such entry"
    for one, key in zip(record.trials, listed, strict=True):
        if one.role == "control" and loaded.study.controls != "none":
            continue  # controls that a study adds itself follow from its report
        if key not in asked and (one.run_id not in known or one.role == "control"):
            yield f"{_describe(one)}: the list of trials has run {one.run_id}, but the study does not need this trial"
        elif key not in asked:
            yield (
                f"{_describe(one)}: run {one.run_id} is listed as this trial, but the study needs it for another trial"
            )
        elif listed.count(key) > 1:
            yield f"{_describe(one)}: run {one.run_id} is listed {listed.count(key)} times"
        elif one.pruned != asked[key].is_cut:
            ended = "ended" if one.pruned else "not ended"
            yield f"{_describe(one)}: run {one.run_id} is listed as {ended} by halving, but should not be"


def _describe(trial: Listed | StudyTrial) -> str:
    words: Sequence[str] = (trial.role, trial.arm, trial.combination, f"seed {trial.seed}")
    return " ".join(filter(None, words))
