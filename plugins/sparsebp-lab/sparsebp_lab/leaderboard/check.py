"""Check whether a study of a task keeps the leaderboard's rules, with one finding for each rule.

Nothing is trained. The check compares the study with the task's own, and its archive with both. Every trial that the
study's rules require must be in the archive, unchanged, and its choices must follow from the trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsebp_cli.compare.archive import open_archive
from sparsebp_cli.compare.load import load_folder
from sparsebp_cli.compare.loaded import LoadedRun, flatten
from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.plan import group_content
from sparsebp_cli.plan.seal import Seal, read_seal
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run import RunFolder
from sparsebp_cli.run.metric import STEP_FLOPS, TEST_LOSS
from sparsebp_lab.leaderboard.finding import FAIL, OK, WARN, RuleFinding, decide, join
from sparsebp_lab.leaderboard.policy import check_policies
from sparsebp_lab.leaderboard.rules import BoardRules
from sparsebp_lab.leaderboard.submission import Submission
from sparsebp_lab.study.loader import LoadedStudy, load_study
from sparsebp_lab.study.rebuild import rebuild
from sparsebp_lab.study.record import Listed, StudyRecord, find_archived
from sparsebp_lab.study.store import has_plan

NEAR = 0.02  # fraction of a budget: the precision of a measured cost. See decision 22.
ROUNDING = 1e-6  # allowed rounding error of a sum over thousands of steps


@dataclass(frozen=True)
class ArchivedRun:
    """A trial of the archive."""

    trial: Listed
    plan: Plan
    seal: Seal | None
    loaded: LoadedRun


def check_submission(submission: Submission, board: BoardRules) -> list[RuleFinding]:
    """Return the finding for each rule, in the order of the guide; a rule is missing if an earlier rule that it needs
    failed."""
    found = [*_check_about(submission)]
    try:
        task = load_study(board.find_task(submission.task))
        mine = load_study(submission.study)
    except SparseBPError as error:
        hint = "install the package of a policy that is not found: pip install FOLDER" if submission.about else ""
        return [*found, RuleFinding(FAIL, "study", str(error), hint)]
    found += check_study(mine, task, submission, board)
    if submission.about is not None:
        found += check_policies(mine, submission)
    try:
        archive = open_archive(submission.archive)
        record = find_archived(mine.study.study, archive)
    except (SparseBPError, OSError) as error:
        hint = f"sparsebp archive @{mine.study.study} --to {submission.archive.name}"
        return [*found, RuleFinding(FAIL, "archive", " ".join(str(error).split()), hint)]
    return [*found, *check_archive(mine, record, archive, submission, board)]


def _check_about(submission: Submission) -> Iterator[RuleFinding]:
    """Yield authors, licence and citation for the reader of the findings; the file must have them."""
    if (about := submission.about) is not None:
        yield RuleFinding(OK, "authors", ", ".join(about.authors))
        yield RuleFinding(OK, "licence", about.licence)
        yield RuleFinding(OK, "cites", about.cites)


def check_study(
    mine: LoadedStudy, task: LoadedStudy, submission: Submission, board: BoardRules
) -> Iterator[RuleFinding]:
    """Yield the findings for the study's file, compared with the task's own."""
    yield _check_same(mine, task)
    yield _check_seeds(mine, task)
    yield _check_controls(mine, task, board)
    methods = [arm for arm in mine.study.arms if arm not in board.rules.controls]
    if unknown := [arm for arm in submission.methods if arm not in methods]:
        text = f"{unknown[0]!r} is no method of the study, whose methods are {', '.join(methods) or 'none'}"
        yield RuleFinding(FAIL, "methods", text)
    elif submission.methods and (others := [arm for arm in methods if arm not in submission.methods]):
        # Otherwise a submission could name the luckiest of many arms: all tried arms must be rows.
        yield RuleFinding(FAIL, "methods", f"{join(others)} of the study: not among the methods of submission.yaml")
    yield from (_check_method(arm, mine, task, board) for arm in methods)


def _check_same(mine: LoadedStudy, task: LoadedStudy) -> RuleFinding:
    """Compare what all arms share with the task's study."""
    wrong = []
    for key in ("vary", "search", "budget", "controls"):
        own, asked = (getattr(one.study, key) for one in (mine, task))
        if own != asked:
            wrong.append(f"{key} must be {_show(asked)}, got {_show(own)}")
    own, asked = mine.study.shares, task.study.shares
    for arm, source in own.items():
        if asked.get(arm) != source:
            wrong.append(f"shares gives {arm} the values of {source}, but every method needs its own tuning trials")
            break
    wrong += [f"shares must have {arm}: {source}" for arm, source in asked.items() if arm not in own]
    text = "varied keys, their values, search and budget are the task's"
    return decide("equal terms", wrong, text)


def _check_seeds(mine: LoadedStudy, task: LoadedStudy) -> RuleFinding:
    """Require the task's seeds and no others: a submitter could add suitable seeds after seeing their results."""
    wrong = []
    for name in ("tune", "report"):
        own, asked = (sorted(getattr(one.study.seeds, name)) for one in (mine, task))
        if own != asked:
            wrong.append(f"{name} must have the task's seeds {_list(asked)}, got {_list(own)}")
    text = f"{len(mine.study.seeds.tune)} of tuning, {len(mine.study.seeds.report)} of the report"
    return decide("seeds", wrong, text)


def _check_controls(mine: LoadedStudy, task: LoadedStudy, board: BoardRules) -> RuleFinding:
    asked = [arm for arm in task.study.arms if arm in board.rules.controls]
    wrong = []
    for arm in asked:
        if arm not in mine.study.arms:
            wrong.append(f"{arm} is missing")
        elif keys := find_changes(mine.firsts[arm].recipe, task.firsts[arm].recipe):
            wrong.append(f"{arm} differs from the task's arm in {join(keys)}")
    return decide("controls", wrong, ", ".join(asked))


def _check_method(arm: str, mine: LoadedStudy, task: LoadedStudy, board: BoardRules) -> RuleFinding:
    """Compare a method with dense: it may change only policy, adapter or form of the optimizer."""
    payer = str(task.study.budget.as_arm) if task.study.budget is not None else next(iter(task.study.arms))
    keys = find_changes(mine.firsts[arm].recipe, task.firsts[payer].recipe)
    allowed = board.rules.may_change
    others = [key for key in keys if not any(key == one or key.startswith(f"{one}.") for one in allowed)]
    if others:
        text = f"{arm} changes {join(others)}; a method may change {', '.join(allowed)}"
        return RuleFinding(FAIL, "method", text)
    policy, rest = [[key for key in keys if key.startswith("policy.") is of_it] for of_it in (True, False)]
    shown = ", ".join([*rest, *([join(policy)] if policy else [])])  # every key but the policy's: it may be a setting
    return RuleFinding(OK, "method", f"{arm}: {shown or 'nothing is changed'}")


def find_changes(one: Recipe, other: Recipe) -> list[str]:
    """Return the dotted keys in which two recipes differ in what they train. Local paths count by name if both recipes
    have one; a folder named like a packaged or hub model is another model."""
    left, right = (flatten(group_content(recipe)) for recipe in (one, other))
    for key in ("model.name", "model.tokenizer", "dataset.name"):
        names = [flat.get(key) for flat in (left, right)]
        if all(isinstance(name, str) and Path(name).exists() and Path(name).is_absolute() for name in names):
            left[key], right[key] = (Path(str(name)).name for name in names)
    keys = dict.fromkeys([*left, *right])
    return [key for key in keys if left.get(key) != right.get(key)]


def check_archive(
    mine: LoadedStudy, record: StudyRecord, archive: Path, submission: Submission, board: BoardRules
) -> Iterator[RuleFinding]:
    """Yield the findings for the archive."""
    rebuilt = rebuild(mine, archive)
    text = f"{rebuilt.num_trials} trials, unchanged since they were archived, and none beyond those that the rules need"
    yield decide("trials", rebuilt.faults, text)
    others = [arm.describe() for arm in rebuilt.arms if arm.rebuilt != arm.reported or arm.reported is None]
    yield decide("choices", others, "every arm is reported with what its trials choose")
    yield from (RuleFinding(WARN, "edges", text) for text in rebuilt.edges)
    if record.generation:
        text = f"the study was trained {record.generation + 1} times, but only its first results count"
        yield RuleFinding(FAIL, "first results", text)
    runs = read_runs(record, archive)
    yield _check_finished(mine, runs)
    yield _check_commit(runs)
    yield _check_code(runs, board.rules.controls)
    rule = board.rules.tasks[submission.task]
    yield _check_data(runs, rule.data)
    yield _check_budget(runs, rule.flops)
    unpriced = [_name(one) for one in runs if one.trial.role == "report" and not one.loaded.series(STEP_FLOPS.name)]
    yield decide("price", unpriced, "every step of the report has its FLOPs, update included", hint="no cost of steps")


def read_runs(record: StudyRecord, archive: Path) -> list[ArchivedRun]:
    """Return the readable trials of an archive."""
    found = []
    for trial in record.trials:
        run = RunFolder(archive / "runs" / trial.run_id)
        if has_plan(run):
            found.append(ArchivedRun(trial, Plan.load(run.plan_file), read_seal(run.path), load_folder(run)))
    return found


def _check_finished(mine: LoadedStudy, runs: Sequence[ArchivedRun]) -> RuleFinding:
    """Require for every arm a run with each report seed that finished, or diverged, which counts against its arm."""
    report = [one for one in runs if one.trial.role == "report"]
    finished = [one for one in report if one.loaded.finished]
    diverged = [one for one in report if one.loaded.broke_down]
    done = {(one.trial.arm, one.trial.seed) for one in (*finished, *diverged)}
    asked = [(arm, seed) for arm in mine.study.arms for seed in mine.study.seeds.report]
    missing = [f"{arm} seed {seed} has not finished" for arm, seed in asked if (arm, seed) not in done]
    missing += [f"{_name(one)} has no loss on the test split" for one in finished if not _has_test_loss(one.loaded)]
    text = f"{len(finished)} runs have finished" + (f", {len(diverged)} diverged" if diverged else "")
    return decide("report", missing, text)


def _has_test_loss(run: LoadedRun) -> bool:
    values = run.evaluations(TEST_LOSS.name)
    return bool(values) and math.isfinite(values[-1])


def _check_budget(runs: Sequence[ArchivedRun], known: float | None) -> RuleFinding:
    """Check the budget. It follows from a rehearsal of dense in the same archive, so it is compared with the task's; no
    report run may exceed it by more than its last step."""
    wrong = []
    for one in runs:
        limit = one.plan.recipe.training.max_flops
        if one.trial.role not in {"tune", "report"} or limit is None:
            continue
        if known is not None and abs(limit / known - 1.0) > NEAR:
            wrong.append(f"{_name(one)} may spend {limit:.4g} FLOPs, the task's budget is {known:.4g}")
        spent = [*one.loaded.series(STEP_FLOPS.name).values()]
        if sum(spent[:-1]) > limit * (1.0 + ROUNDING):
            wrong.append(f"{_name(one)} spent {sum(spent):.4g} FLOPs of {limit:.4g}")
    text = "no run spends more than its budget" + ("" if known is None else f", which is the task's {known:.4g} FLOPs")
    return decide("budget", wrong, text)


def _check_commit(runs: Sequence[ArchivedRun]) -> RuleFinding:
    dirty = [_name(one) for one in runs if one.plan.provenance.dirty]
    commits = {one.plan.provenance.git_sha for one in runs}
    if dirty:
        return RuleFinding(FAIL, "commit", f"uncommitted changes: {join(dirty)}", "commit them, and train again")
    if commits != {""} and len(commits) == 1:
        return RuleFinding(OK, "commit", next(iter(commits)))
    text = "no commit is known" if commits == {""} else f"trials are of {len(commits)} commits: {join(sorted(commits))}"
    return RuleFinding(FAIL, "commit", text, "train all of it from one commit of the folder with the study")


def _check_code(runs: Sequence[ArchivedRun], controls: Sequence[str]) -> RuleFinding:
    seals = [one.seal for one in runs if one.seal is not None]
    # Only an arm's own code contains its policy's package.
    versions: dict[str, set[str]] = {}
    for seal in seals:
        for name, version in seal.code.items():
            versions.setdefault(name, set()).add(version)
    mixed = [f"{name} {', '.join(sorted(some))}" for name, some in versions.items() if len(some) > 1]
    # All trials must have the code versions of the control trials; otherwise a checkout and an installed package could
    # be mixed.
    core = {name for one in runs if one.seal is not None and one.trial.arm in controls for name in one.seal.code}
    partial = [_name(one) for one in runs if one.seal is not None and not core <= {*one.seal.code}]
    if mixed or partial or len(seals) < len(runs):
        text = f"more than one version: {join(mixed, '; ')}" if mixed else "a trial does not record its code versions"
        return RuleFinding(FAIL, "code", text + (f": {join(partial)}" if partial and not mixed else ""))
    return RuleFinding(OK, "code", ", ".join(f"{name} {next(iter(some))}" for name, some in versions.items()))


def _check_data(runs: Sequence[ArchivedRun], known: str) -> RuleFinding:
    """Require the task's examples, by digest; rehearsals have no test split and so another digest."""
    found = {one.seal.data for one in runs if one.seal is not None and one.trial.role in {"tune", "report"}}
    if not known:
        return RuleFinding(WARN, "data", f"the rules have no digest of this task yet; here it is {join(sorted(found))}")
    if found != {known}:
        text = f"the digest of the examples is {join(sorted(found)) or 'not recorded'}, the task's is {known}"
        return RuleFinding(FAIL, "data", text)
    return RuleFinding(OK, "data", f"the task's examples, digest {known}")


def _name(one: ArchivedRun) -> str:
    return " ".join(filter(None, (one.trial.role, one.trial.arm, one.trial.combination, f"seed {one.trial.seed}")))


def _list(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _show(value: object) -> str:
    plain = value.model_dump(mode="json", exclude_none=True) if hasattr(value, "model_dump") else value
    if isinstance(plain, Mapping):
        return "{" + ", ".join(f"{key}: {_show(one)}" for key, one in plain.items() if one != {}) + "}"
    return str(plain)
