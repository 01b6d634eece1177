"""Find stored runs, and their jobs on their targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebp_cli.cli.screen import print_line
from sparsebp_cli.entry_point import find_tool, tell_home
from sparsebp_cli.errors import DataError, PolicyError, UsageError
from sparsebp_cli.run import RunFolder, find_run, home, list_runs
from sparsebp_cli.run.label import Labels

if TYPE_CHECKING:
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.recipe import Recipe
    from sparsebp_cli.target import Job, Target


def find_one(word: str) -> RunFolder:
    """Return the run that a word names. If several have a name, return the newest, and say so on standard error."""
    found = find_run(word)
    if len(found) > 1:
        print_line(f"note: {len(found)} runs are named {word}; this is the newest, {found[-1].run_id}", stderr=True)
    return found[-1]


def find_all(words: list[str]) -> list[RunFolder]:
    """Return every run that one of the words names, without duplicates, in the order of the words. ``@STUDY`` names the
    trials of a study."""
    return list({run.run_id: run for word in words for run in _find_trials(word) or find_run(word)}.values())


def find_studies(what: str) -> Any:
    """Return the tool that reads studies. Raise UsageError if it is missing; ``what`` names what needs it."""
    if (tool := find_tool("study")) is None:
        raise UsageError(f"{what} is {tell_home('sparsebp-lab')}")
    return tool


def find_study(word: str, place: Path | None = None) -> Any:
    """Return the study of this machine, or of an archive's folder, that ``@STUDY`` names. Return None if the word names
    no study, or the newest runs. Raise UsageError for a word that is also a tag of this machine's runs."""
    name = word.removeprefix("@")
    if not word.startswith("@") or name == "last" or name.isdecimal() or name != Path(name).name:
        return None
    tool = find_tool("study")
    if tool is None or (record := tool.load(name, place)) is None:
        return None
    if place is None and any(name in Labels.load(run.path).tags for run in list_runs()):
        raise UsageError(f"{word} is the name of a study and also a tag: name the runs by their ids, or remove the tag")
    return record


def _find_trials(word: str) -> list[RunFolder]:
    """Return the runs of a study's trials that were begun; none if the word names no study."""
    record = find_study(word)
    runs = (RunFolder(home() / "runs" / trial.run_id) for trial in (record.trials if record else ()))
    return [run for run in runs if run.plan_file.is_file()]


def target_of(run: RunFolder) -> Target:
    """Return the target in a run's plan."""
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.target import make_target

    return make_target(Plan.load(run.plan_file).recipe.target)


def ask_target(run: RunFolder) -> None:
    """Ask a remote run's target for its worker, if the local folder does not say how its last start ended. If a worker
    is found, the run becomes unreachable until a remote runner follows it again. Raise UnreachableError if the target
    does not answer."""
    from sparsebp_cli.errors import RunNotFoundError

    try:
        target = target_of(run)
    except RunNotFoundError:
        return  # its target is unknown; only the local folder remains
    except UsageError:  # its kind is not installed: a run whose event log has its end needs no answer
        if run.ended() is not None:
            return
        raise
    target.recover(run)


def submit_all(folders: Sequence[RunFolder], max_parallel: int = 1) -> list[Job]:
    """Submit runs, each to the target of its plan. Runs of one target are one submission. At most ``max_parallel`` work
    at once on each target. Return one job per run, in order."""
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.target import make_target

    sections = [Plan.load(folder.plan_file).recipe.target for folder in folders]
    jobs: dict[str, Job] = {}
    for section in dict.fromkeys(section.model_dump_json() for section in sections):
        chosen = [f for f, s in zip(folders, sections, strict=True) if s.model_dump_json() == section]
        target = make_target(next(s for s in sections if s.model_dump_json() == section))
        jobs |= {job.run.run_id: job for job in target.submit_all(chosen, max_parallel=max_parallel)}
    return [jobs[folder.run_id] for folder in folders]


def check_plans(plans: Sequence[Plan]) -> None:
    """Raise ``UsageError`` for a plan that its target cannot run, and ``TrackingError`` for an unusable store address,
    before anything is written or started."""
    from sparsebp_cli.target import make_target
    from sparsebp_cli.tracking import resolve_uri

    for plan in plans:
        resolve_uri(plan.recipe.tracking.uri)
        make_target(plan.recipe.target).check_plan(plan)


def check_trainable(folders: Sequence[RunFolder]) -> None:
    """Raise ``UsageError`` for a run whose keys, policies, optimizer or metrics this installation cannot train, or
    whose model or data are no longer on this machine, before anything is written or started."""
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.policy import make_policies
    from sparsebp_cli.policy.composition import find_optimizer
    from sparsebp_cli.recipe.evaluation import find_unmeasured
    from sparsebp_cli.run.stored_recipe import MARK

    for folder in folders:
        plan = Plan.load(folder.plan_file)
        try:
            make_policies(entry.model_dump() for entry in plan.recipe.policy)
            _, mark, key = plan.recipe.dataset.split.partition(MARK)
            if mark:
                raise UsageError(f"{key} was removed after version 0.5: train again without it")
            for fault in find_unmeasured(plan.recipe):
                raise UsageError(f"{fault.key}: {fault.text}")
            try:
                find_optimizer(plan.recipe.training.optim)
            except UsageError as error:
                raise UsageError(f"training.optim: {error}") from None
            _find_files(plan.recipe)
        except (PolicyError, UsageError) as error:
            begun = f"{folder.run_id} was begun by sparsebp {plan.provenance.sparsebp_version}"
            raise UsageError(f"{begun}, and cannot continue here: {error}") from None


def _find_files(recipe: Recipe) -> None:
    """Raise ``UsageError`` if a model or data that a local run reads are gone."""
    from sparsebp_cli.recipe.evaluation import has_own_worker
    from sparsebp_cli.source import DATASETS, MODELS, find_source

    if recipe.target.kind != "local" or not has_own_worker(recipe):
        return
    model = recipe.model
    named = {"model.name": model.name, "model.tokenizer": model.tokenizer, "model.adapter": model.adapter}
    for key, name in {**named, "dataset.name": recipe.dataset.name}.items():
        try:
            if name is not None:
                find_source(name, MODELS if key in named else DATASETS)
        except DataError as error:
            raise UsageError(f"{key}: {error}") from None


def reattach(run: RunFolder) -> Job:
    """Return the job of a run that was submitted before. An ended run needs no target, whose plug-in may be gone."""
    from sparsebp_cli.target.local import LocalJob

    try:
        return target_of(run).reattach(run)
    except UsageError:
        if run.ended() is None:
            raise
        return LocalJob(run)
