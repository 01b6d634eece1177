"""Does a study of a task keep the leaderboard's rules? One finding a rule: what is there, and what is missing.

Nothing is trained. The study is held against the task's own, and its archive against both: every trial that the rules
of the study ask for is there as it was archived, and its choices follow from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsebp_cli.compare.archive import open_archive
from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.compare.loaded import LoadedRun, flatten
from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.leaderboard.finding import FAIL, OK, WARN, Finding, decide, join
from sparsebp_cli.leaderboard.policy import check_policies
from sparsebp_cli.leaderboard.rules import Board
from sparsebp_cli.leaderboard.submission import Submission
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.plan import group_content
from sparsebp_cli.plan.seal import Seal, read_seal
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run.metric import STEP_FLOPS
from sparsebp_cli.study.loader import LoadedStudy, load_study
from sparsebp_cli.study.rebuild import rebuild
from sparsebp_cli.study.store import Listed, StudyRecord, find_archived, has_plan


@dataclass(frozen=True)
class ArchivedRun:
    """A trial of the archive."""

    trial: Listed
    plan: Plan
    seal: Seal | None
    loaded: LoadedRun


def check_submission(submission: Submission, board: Board) -> list[Finding]:
    """Return what was found of each rule, in the order of the guide; a later one is left out where it needs an earlier
    one that failed."""
    found = [*_check_about(submission)]
    try:
        task = load_study(board.find_task(submission.task))
        mine = load_study(submission.study)
    except SparseBPError as error:
        hint = "install the package of a policy that is not found: pip install FOLDER" if submission.about else ""
        return [*found, Finding(FAIL, "study", str(error), hint)]
    found += check_study(mine, task, submission, board)
    if submission.about is not None:
        found += check_policies(mine, submission)
    try:
        archive = open_archive(submission.archive)
        record = find_archived(mine.study.study, archive)
    except (SparseBPError, OSError) as error:
        hint = f"sparsebp archive @{mine.study.study} --to {submission.archive.name}"
        return [*found, Finding(FAIL, "archive", " ".join(str(error).split()), hint)]
    return [*found, *check_archive(mine, record, archive, submission, board)]


def _check_about(submission: Submission) -> Iterator[Finding]:
    """Yield what a person reads before the row is theirs; the file cannot be without."""
    if (about := submission.about) is not None:
        yield Finding(OK, "authors", ", ".join(about.authors))
        yield Finding(OK, "licence", about.licence)
        yield Finding(OK, "cites", about.cites)


def check_study(mine: LoadedStudy, task: LoadedStudy, submission: Submission, board: Board) -> Iterator[Finding]:
    """Yield what was found of the study's file beside the task's own."""
    yield _check_same(mine, task)
    yield _check_seeds(mine, task, board)
    yield _check_controls(mine, task, board)
    methods = [arm for arm in mine.study.arms if arm not in board.rules.controls]
    if unknown := [arm for arm in submission.methods if arm not in methods]:
        text = f"{unknown[0]!r} is no method of the study, whose methods are {', '.join(methods) or 'none'}"
        yield Finding(FAIL, "methods", text)
    yield from (_check_method(arm, mine, task, board) for arm in methods)


def _check_same(mine: LoadedStudy, task: LoadedStudy) -> Finding:
    """Hold what all arms have in common against the task's."""
    wrong = []
    for key in ("vary", "search", "budget", "controls"):
        own, asked = (getattr(one.study, key) for one in (mine, task))
        if own != asked:
            wrong.append(f"{key} must be {_show(asked)}, got {_show(own)}")
    extra = {arm: source for arm, source in mine.study.shares.items() if task.study.shares.get(arm) != source}
    if extra:
        arm, source = next(iter(extra.items()))
        wrong.append(f"{arm} takes the values of {source} (shares), and every method has trials of its own")
    text = "varied keys, their values, search and budget are the task's"
    return decide("equal terms", wrong, text)


def _check_seeds(mine: LoadedStudy, task: LoadedStudy, board: Board) -> Finding:
    least = board.rules.seeds
    wrong = []
    for name, number in (("tune", least.tune), ("report", least.report)):
        own, asked = (getattr(one.study.seeds, name) for one in (mine, task))
        if len(own) < number:
            wrong.append(f"{name} has {len(own)} seeds, at least {number} are asked for")
        elif missing := [seed for seed in asked if seed not in own]:
            wrong.append(f"{name} lacks the task's seeds {', '.join(map(str, missing))}, with which arms are paired")
    text = f"{len(mine.study.seeds.tune)} of tuning, {len(mine.study.seeds.report)} of the report"
    return decide("seeds", wrong, text)


def _check_controls(mine: LoadedStudy, task: LoadedStudy, board: Board) -> Finding:
    asked = [arm for arm in task.study.arms if arm in board.rules.controls]
    wrong = []
    for arm in asked:
        if arm not in mine.study.arms:
            wrong.append(f"{arm} is missing")
        elif keys := find_changes(mine.firsts[arm].recipe, task.firsts[arm].recipe):
            wrong.append(f"{arm} is not the task's: {join(keys)}")
    return decide("controls", wrong, ", ".join(asked))


def _check_method(arm: str, mine: LoadedStudy, task: LoadedStudy, board: Board) -> Finding:
    """Hold a method against dense: it may be another policy, adapter or form of the optimizer, and nothing else."""
    payer = str(task.study.budget.as_arm) if task.study.budget is not None else next(iter(task.study.arms))
    keys = find_changes(mine.firsts[arm].recipe, task.firsts[payer].recipe)
    allowed = board.rules.may_change
    others = [key for key in keys if not any(key == one or key.startswith(f"{one}.") for one in allowed)]
    if others:
        text = f"{arm} changes {join(others)}; a method may change {', '.join(allowed)}"
        return Finding(FAIL, "method", text)
    return Finding(OK, "method", f"{arm}: {join(keys) or 'nothing is changed'}")


def find_changes(one: Recipe, other: Recipe) -> list[str]:
    """Return the dotted keys in which two recipes train something else; local paths count by their names."""
    left, right = (flatten(group_content(recipe)) for recipe in (one, other))
    for flat in (left, right):
        for key in ("model.name", "model.tokenizer", "dataset.name"):
            if isinstance(name := flat.get(key), str) and "/" in name:
                flat[key] = Path(name).name
    keys = dict.fromkeys([*left, *right])
    return [key for key in keys if left.get(key) != right.get(key)]


def check_archive(
    mine: LoadedStudy, record: StudyRecord, archive: Path, submission: Submission, board: Board
) -> Iterator[Finding]:
    """Yield what was found of the archive."""
    rebuilt = rebuild(mine, archive)
    text = f"{rebuilt.num_trials} trials, as they were archived, and none that the rules do not ask for"
    yield decide("trials", rebuilt.faults, text)
    others = [arm.describe() for arm in rebuilt.arms if arm.rebuilt != arm.reported or arm.reported is None]
    yield decide("choices", others, "every arm is reported with what its trials choose")
    yield from (Finding(WARN, "edges", text) for text in rebuilt.edges)
    runs = read_runs(record, archive)
    yield _check_finished(mine, runs)
    yield _check_commit(runs)
    yield _check_code(runs)
    yield _check_data(runs, board.rules.tasks[submission.task].data)
    unpriced = [_name(one) for one in runs if one.trial.role == "report" and not one.loaded.series(STEP_FLOPS.name)]
    yield decide("price", unpriced, "every step of the report has its FLOPs, update included", hint="no price of steps")


def read_runs(record: StudyRecord, archive: Path) -> list[ArchivedRun]:
    """Return the trials of an archive that can be read."""
    found = []
    for trial in record.trials:
        run = RunFolder(archive / "runs" / trial.run_id)
        if has_plan(run):
            found.append(ArchivedRun(trial, Plan.load(run.plan_file), read_seal(run.path), load_folder(run)))
    return found


def _check_finished(mine: LoadedStudy, runs: Sequence[ArchivedRun]) -> Finding:
    """Every arm has a finished run with every seed of the report; one that diverged is a result of tuning alone."""
    done = {(one.trial.arm, one.trial.seed) for one in runs if one.trial.role == "report" and one.loaded.finished}
    asked = [(arm, seed) for arm in mine.study.arms for seed in mine.study.seeds.report]
    missing = [f"{arm} seed {seed} has not finished" for arm, seed in asked if (arm, seed) not in done]
    return decide("report", missing, f"{len(done)} runs have finished")


def _check_commit(runs: Sequence[ArchivedRun]) -> Finding:
    dirty = [_name(one) for one in runs if one.plan.provenance.dirty]
    commits = {one.plan.provenance.git_sha for one in runs}
    if dirty:
        return Finding(FAIL, "commit", f"uncommitted changes: {join(dirty)}", "commit them, and train again")
    if commits != {""} and len(commits) == 1:
        return Finding(OK, "commit", next(iter(commits)))
    text = "no commit is known" if commits == {""} else f"trials are of {len(commits)} commits: {join(sorted(commits))}"
    return Finding(FAIL, "commit", text, "train all of it from one commit of the folder with the study")


def _check_code(runs: Sequence[ArchivedRun]) -> Finding:
    seals = [one.seal for one in runs if one.seal is not None]
    # A policy's package is in the code of its own arm alone.
    versions: dict[str, set[str]] = {}
    for seal in seals:
        for name, version in seal.code.items():
            versions.setdefault(name, set()).add(version)
    mixed = [f"{name} {', '.join(sorted(some))}" for name, some in versions.items() if len(some) > 1]
    if mixed or len(seals) < len(runs):
        text = f"more than one version: {join(mixed, '; ')}" if mixed else "a trial does not say what it ran with"
        return Finding(FAIL, "code", text)
    return Finding(OK, "code", ", ".join(f"{name} {next(iter(some))}" for name, some in versions.items()))


def _check_data(runs: Sequence[ArchivedRun], known: str) -> Finding:
    """The examples are the task's, by their digest; a rehearsal has no test split, so its digest is another one."""
    found = {one.seal.data for one in runs if one.seal is not None and one.trial.role in {"tune", "report"}}
    if not known:
        return Finding(WARN, "data", f"the rules have no digest of this task yet; here it is {join(sorted(found))}")
    if found != {known}:
        text = f"the digest of the examples is {join(sorted(found)) or 'not recorded'}, the task's is {known}"
        return Finding(FAIL, "data", text)
    return Finding(OK, "data", f"the task's examples, digest {known}")


def _name(one: ArchivedRun) -> str:
    return " ".join(filter(None, (one.trial.role, one.trial.arm, one.trial.combination, f"seed {one.trial.seed}")))


def _show(value: object) -> str:
    plain = value.model_dump(mode="json", exclude_none=True) if hasattr(value, "model_dump") else value
    if isinstance(plain, Mapping):
        return "{" + ", ".join(f"{key}: {_show(one)}" for key, one in plain.items() if one != {}) + "}"
    return str(plain)
