"""Find the runs of a study's trials on this machine, or in an archive."""

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
    """Find the runs of trials: each under its trial's id, or a finished one that another command made."""

    def __init__(self, maker: TrialMaker, archive: Path | None = None) -> None:
        self._maker = maker
        self._archive = archive  # folder of an unpacked archive; then only its runs count
        self._runs = (archive or home()) / "runs"
        self._others: dict[tuple[int, int], list[Path]] | None = None  # folders by seed and steps
        self._found: dict[str, RunFolder] = {}
        self._loaded: dict[str, LoadedRun] = {}
        self._disk: dict[str, DiskUse] = {}

    def find(self, trial: StudyTrial) -> RunFolder:
        """Return the folder of a trial's run; it may not exist yet."""
        if trial.run_id not in self._found:
            own = RunFolder(self._runs / trial.run_id)
            other = None if own.plan_file.is_file() else self._find_other(trial)
            self._found[trial.run_id] = other or own
        return self._found[trial.run_id]

    def is_done(self, trial: StudyTrial) -> bool:
        """Return whether a trial's run has finished."""
        run = self.find(trial)
        return has_plan(run) and run.state() is State.FINISHED

    def load(self, trial: StudyTrial) -> LoadedRun | None:
        """Read the run of a trial, once if it is over; None if there is none yet."""
        run = self.find(trial)
        if run.run_id in self._loaded:
            return self._loaded[run.run_id]
        if not has_plan(run):
            return None
        loaded = load_folder(run)
        # A failed or interrupted run may be tried again, and then changes.
        if loaded.state in {State.FINISHED, State.CANCELLED}:
            self._loaded[run.run_id] = loaded
        return loaded

    def measure(self, trial: StudyTrial) -> DiskUse:
        """Measure the disk of a trial's run that has finished, once."""
        if trial.run_id not in self._disk:
            self._disk[trial.run_id] = measure_disk(self.find(trial))
        return self._disk[trial.run_id]

    def _find_other(self, trial: StudyTrial) -> RunFolder | None:
        """Find the oldest finished run of the same recipe, seed, code and data under another id; in an archive, of the
        same recipe and seed, since code and data paths may differ."""
        if self._maker.generation and self._archive is None:  # a new generation repeats runs on purpose
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
        # Check every attempt, because other code may have trained a part of the run.
        seals = [Seal.from_json(record["values"]) for record, _ in read(run.path) if record["kind"] == "seal"]
        same = bool(seals) and all(
            seal is not None and seal.code == self._maker.find_code(trial.recipe) for seal in seals
        )
        named = [Path(name) for name in find_sources(trial.recipe).values()]
        # A file that is newer than the plan may differ from what the run has read. See decision 39.
        return same and all(
            path.stat().st_mtime <= plan.created for path in named if path.is_absolute() and path.exists()
        )


def has_plan(run: RunFolder) -> bool:
    """Return whether a run has a readable plan. A trial's plan follows from its study, so an unreadable one, such as an
    empty file after a power failure, is written again."""
    try:
        run.read_plan()
    except RunNotFoundError:
        return False
    return True


def _name_sources(recipe: Recipe) -> str:
    """Return what decides a recipe's result, with names instead of paths of local models and data."""
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
