"""Finds the runs of a study's trials in the store of this machine, or in an archive."""

from __future__ import annotations

import json
from pathlib import Path

from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.errors import RunNotFoundError
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.plan import find_sources, group_content
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run import RunFolder, State, home, read
from sparsebp_cli.run.budget import LARGEST_PLAN, read_json
from sparsebp_cli.run.folder import list_folders
from sparsebp_lab.study.disk import DiskUse, measure_disk
from sparsebp_lab.study.trial import StudyTrial, TrialMaker


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
