"""What a store already has of a study: the runs of its trials, and ``studies/NAME.json``, which lists them.

    {"study": "NAME", "file": "/the/study.yaml", "generation": 0, "trials": [{"run_id": ..., "role": ..., "arm": ...,
     "combination": ..., "seed": ...}], "paper": {"title": ..., "link": ..., "claims": [...], "scaled": [...]},
     "options": [...]}

The list is written again by each command; the runs alone say what is done.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebp_cli import durable
from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.published import Paper
from sparsebp_cli.errors import RunNotFoundError, UsageError, did_you_mean
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.plan import find_sources, group_content
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run import RunFolder, State, home, read
from sparsebp_cli.run.budget import LARGEST_ARTIFACT, LARGEST_JOURNAL, LARGEST_PLAN, read_bounded, read_json
from sparsebp_cli.run.folder import list_folders
from sparsebp_cli.run.journal import FILE as JOURNAL
from sparsebp_cli.study.disk import DiskUse, measure_disk
from sparsebp_cli.study.thin import thin_journal
from sparsebp_cli.study.trial import StudyTrial, TrialMaker


class TrialStore:
    """Finds the runs of trials: each under the id of its trial, or a finished one that another command made."""

    def __init__(self, maker: TrialMaker, archive: Path | None = None) -> None:
        self._maker = maker
        self._archive = archive  # the folder of an unpacked archive, whose runs alone are there
        self._runs = (archive or home()) / "runs"
        self._others: dict[tuple[int, int], list[Path]] | None = None  # seed and steps to folders
        self._found: dict[str, RunFolder] = {}
        self._loaded: dict[str, LoadedRun] = {}
        self._disk: dict[str, DiskUse] = {}

    def find(self, trial: StudyTrial) -> RunFolder:
        """Return the folder of a trial's run, which may not exist yet."""
        if trial.run_id not in self._found:
            own = RunFolder(self._runs / trial.run_id)
            other = None if own.plan_file.is_file() else self._find_other(trial)
            self._found[trial.run_id] = other or own
        return self._found[trial.run_id]

    def is_done(self, trial: StudyTrial) -> bool:
        """Whether a trial's run has finished."""
        run = self.find(trial)
        return has_plan(run) and run.state() is State.FINISHED

    def load(self, trial: StudyTrial) -> LoadedRun | None:
        """Read the run of a trial; None if there is none yet. A run that is over is read once."""
        run = self.find(trial)
        if run.run_id in self._loaded:
            return self._loaded[run.run_id]
        if not has_plan(run):
            return None
        loaded = load_folder(run)
        # One that failed or was interrupted may be tried again, and then there is more to read.
        if loaded.state in {State.FINISHED, State.CANCELLED}:
            self._loaded[run.run_id] = loaded
        return loaded

    def measure(self, trial: StudyTrial) -> DiskUse:
        """Measure the disk of a trial's run that has finished, once."""
        if trial.run_id not in self._disk:
            self._disk[trial.run_id] = measure_disk(self.find(trial))
        return self._disk[trial.run_id]

    def _find_other(self, trial: StudyTrial) -> RunFolder | None:
        """Find the oldest finished run of the same recipe, seed, code and data under another id; in an archive, any of
        the same recipe and seed, since code and the places of data may be others by now."""
        if self._maker.generation and self._archive is None:  # these are repeated on purpose
            return None
        if self._others is None:
            self._others = _index_runs(self._runs)
        found = []
        for path in self._others.get((trial.seed, trial.steps), []):
            run = RunFolder(path)
            try:
                plan = Plan.load(run.plan_file)
            except RunNotFoundError:
                continue
            if self._archive is not None:
                is_same = _name_sources(plan.recipe) == _name_sources(trial.recipe)
            else:
                is_same = plan.group == trial.group and run.state() is State.FINISHED
            if is_same and (self._archive is not None or self._has_same_code(trial, run, plan)):
                found.append((plan.created, run.run_id, run))
        return min(found)[2] if found else None

    def _has_same_code(self, trial: StudyTrial, run: RunFolder, plan: Plan) -> bool:
        # Every attempt's: a part of the run may have been trained by other code.
        seals = [Seal.from_json(record["values"]) for record, _ in read(run.path) if record["kind"] == "seal"]
        same = bool(seals) and all(
            seal is not None and seal.code == self._maker.find_code(trial.recipe) for seal in seals
        )
        named = [Path(name) for name in find_sources(trial.recipe).values()]
        # A file that is newer than the plan may not be what the run has read. See decision 39.
        return same and all(
            path.stat().st_mtime <= plan.created for path in named if path.is_absolute() and path.exists()
        )


def has_plan(run: RunFolder) -> bool:
    """Whether a run has a plan that can be read. A trial's plan follows from its study, so that another one, such as an
    empty file after a power cut, is as good as none: it is made again."""
    try:
        run.read_plan()
    except RunNotFoundError:
        return False
    return True


def _name_sources(recipe: Recipe) -> str:
    """Return what decides a recipe's result, with the names of local models and data in the place of their paths."""
    text = json.dumps(group_content(recipe), sort_keys=True)
    for name in find_sources(recipe).values():
        if Path(name).is_absolute():
            text = text.replace(json.dumps(name), json.dumps(Path(name).name))
    return text


def _index_runs(runs: Path) -> dict[tuple[int, int], list[Path]]:
    """Return the folders of all runs by seed and steps, without validating their plans."""
    found: dict[tuple[int, int], list[Path]] = {}
    for folder in list_folders(runs):
        try:
            training = read_json(folder / "plan.json", LARGEST_PLAN)["recipe"]["training"]
            found.setdefault((int(training["seed"]), int(training["max_steps"])), []).append(folder)
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return found


@dataclass(frozen=True)
class Listed:
    """A trial in the list of a study."""

    run_id: str
    role: str
    arm: str
    combination: str
    seed: int
    pruned: bool = False  # whether halving has ended it before its last step


@dataclass(frozen=True)
class StudyRecord:
    """The list of a study's trials, so that other commands find them by the study's name."""

    study: str
    file: str
    generation: int
    trials: tuple[Listed, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)  # in an archive: run id to the digest of its journal
    paper: Paper | None = None  # whose setting it is, with its numbers
    options: tuple[str, ...] = ()  # of the command that made it

    @property
    def words(self) -> str:
        """The words after `sparsebp study` that go on with it."""
        return shlex.join([self.file, *self.options])

    @classmethod
    def load(cls, name: str, place: Path | None = None) -> StudyRecord | None:
        """Read the list of a study on this machine, or in the folder of an archive; None if there is none."""
        try:
            content: dict[str, Any] = read_json((place or home()) / "studies" / f"{name}.json", LARGEST_ARTIFACT)
            trials = tuple(Listed(**entry) for entry in content["trials"])
            digests = {str(run): str(digest) for run, digest in content.get("digests", {}).items()}
            paper = None if content.get("paper") is None else Paper.from_json(content["paper"])
            study, options = str(content["study"]), content.get("options", ())
            return cls(
                study,
                str(content["file"]),
                int(content["generation"]),
                trials,
                digests,
                paper,
                tuple(map(str, options)),
            )
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def save(self) -> None:
        """Write the list, atomically."""
        file = _record_file(self.study)
        durable.make_folder(file.parent, exist_ok=True)
        durable.write_file(file, json.dumps(self._content, indent=1) + "\n")

    @property
    def _content(self) -> dict[str, object]:
        trials = [vars(trial) for trial in self.trials]
        content = {"study": self.study, "file": self.file, "generation": self.generation, "trials": trials}
        content |= {} if self.paper is None else {"paper": self.paper.to_json()}
        return content | ({"options": list(self.options)} if self.options else {})

    def find_thin(self) -> frozenset[str]:
        """Return the ids of runs of which a thin archive leaves out single steps: those of tuning alone."""
        kept = {trial.run_id for trial in self.trials if trial.role != "tune"}
        return frozenset(trial.run_id for trial in self.trials) - kept

    def pack(self, thin: Collection[str] = ()) -> tuple[str, bytes]:
        """Return the list as an archive has it, with the name of the member. Of the runs in ``thin`` the archive has
        thin journals."""
        begun = [RunFolder(home() / "runs" / trial.run_id) for trial in self.trials]
        # They show that the archive is the one of its list, and are no signature. See decision 39.
        # One that was stopped before its worker began has a plan alone.
        begun = [run for run in begun if run.plan_file.is_file() and (run.path / JOURNAL).is_file()]
        digests = {run.run_id: digest_journal(run, is_thin=run.run_id in thin) for run in begun}
        content = self._content | {"file": Path(self.file).name, "digests": digests}
        return f"studies/{self.study}.json", (json.dumps(content, indent=1) + "\n").encode()


def digest_journal(run: RunFolder, *, is_thin: bool = False) -> str:
    """Return the digest of a run's journal, which holds all its results, or of its thin form."""
    journal = read_bounded(run.path / JOURNAL, LARGEST_JOURNAL)
    return hashlib.sha256(thin_journal(journal) if is_thin else journal).hexdigest()


def find_archived(name: str, archive: Path) -> StudyRecord:
    """Return the list of a study in the folder of an unpacked archive; raise UsageError if it has none."""
    record = StudyRecord.load(name, archive) if name == Path(name).name else None
    if record is None:
        raise UsageError(f"the archive has no list of study {name}: `sparsebp archive @{name} --to FILE` writes one")
    return record


def find_record(name: str) -> StudyRecord:
    """Return the list of a study; raise RunNotFoundError if this machine has no study of that name."""
    record = StudyRecord.load(name) if name == Path(name).name else None
    if record is None:
        known = list_studies()
        shown = f"; there are {', '.join(known)}" if known else "; `sparsebp study FILE` runs one"
        raise RunNotFoundError(f"no study {name!r} under {home()}{shown}{did_you_mean(name, known)}")
    return record


def list_studies() -> Sequence[str]:
    """Return the names of all studies of this machine."""
    return sorted(file.stem for file in (home() / "studies").glob("*.json"))


def _record_file(name: str) -> Path:
    return home() / "studies" / f"{name}.json"
