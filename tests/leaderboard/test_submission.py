"""Whether a study keeps the leaderboard's rules: a submission that does, and one thing wrong with it at a time. The
worker trains nothing, and its numbers follow from the recipe."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sparsebp_lab.leaderboard.cell import ALLOWED, draw_cells, pooled_spread
from sparsebp_lab.leaderboard.check import check_submission, read_runs
from sparsebp_lab.leaderboard.finding import RuleFinding
from sparsebp_lab.leaderboard.rules import load_board
from sparsebp_lab.leaderboard.submission import read_submission
from sparsebp_lab.study.loader import load_study
from sparsebp_lab.study.record import find_archived
from tests.cli.document import read_document
from tests.study.conftest import BASE, COMMAND

RULES = """\
version: 1
seeds: {tune: 2, report: 2}
controls: [dense]
may_change: [policy, training.group_by]
tasks: {tiny: {data: data}}
"""
TASK = """\
version: 1
study: leaderboard-1-tiny
base: base.yaml
arms:
  dense: {}
vary: {training.learning_rate: [5e-4, 1e-3]}
search: {extend: 0}
budget: {same: cost, as: dense, steps: 20}
seeds: {tune: 0-1, report: 2-3}
"""
MINE = TASK.replace("leaderboard-1-tiny", "mine").replace(
    "dense: {}\n", "dense: {}\n  mine: {policy: [{name: topk, keep: 0.25}]}\n"
)
ABOUT = """\
task: tiny
methods: [mine]
authors: [Ada Lovelace]
licence: Apache-2.0
cites: "A. Lovelace: Notes (1843), https://example.org/notes"
"""
KEPT: list[bytes] = []  # the archive, made once
Edit = Callable[[dict[str, bytes]], None]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("leaderboard-submission")]


@pytest.fixture(autouse=True)
def _leave_nothing_running(no_process_left: None) -> None:
    """The archive comes from workers."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The rules in ``board``, and in ``mine`` a submission that keeps them; both in a repository without changes."""
    board, mine = tmp_path / "board", tmp_path / "mine"
    for folder in (board, mine):
        folder.mkdir()
        (folder / "base.yaml").write_text(BASE.format(test=", test_fraction: 0.5", tags=""))
    (board / "rules.yaml").write_text(RULES)
    (board / "tiny.yaml").write_text(TASK)
    (mine / "study.yaml").write_text(MINE)
    (mine / "submission.yaml").write_text(ABOUT)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *words], check=True)
    if not KEPT:
        run = partial(COMMAND.run, cwd=tmp_path)
        done = run("study", "mine/study.yaml")
        assert done.returncode == 0, done.stdout + done.stderr
        assert run("archive", "@mine", "--to", "mine.tar.gz").returncode == 0
        KEPT.append((tmp_path / "mine.tar.gz").read_bytes())
    (mine / "study.tar.gz").write_bytes(KEPT[0])
    return tmp_path


def check(place: Path) -> list[RuleFinding]:
    return check_submission(read_submission(place / "mine"), load_board(place / "board"))


def failed(place: Path) -> dict[str, str]:
    return {one.what: one.text for one in check(place) if one.level == "fail"}


def change(place: Path, old: str, new: str, name: str = "mine/study.yaml") -> None:
    text = (place / name).read_text()
    assert old in text
    (place / name).write_text(text.replace(old, new))


def edit_archive(place: Path, edit: Edit) -> None:
    file = place / "mine" / "study.tar.gz"
    with tarfile.open(file) as packed:
        members = {one.name: packed.extractfile(one).read() for one in packed}  # type: ignore[union-attr]
    edit(members)
    with gzip.open(file, "wb") as out, tarfile.open(fileobj=out, mode="w|") as packed:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))


def find_run(members: dict[str, bytes], role: str, arm: str) -> str:
    listed = json.loads(members["studies/mine.json"])["trials"]
    return f"runs/{next(one['run_id'] for one in listed if (one['role'], one['arm']) == (role, arm))}"


def test_a_submission_that_keeps_every_rule_is_accepted(place: Path) -> None:
    found = check(place)
    assert {one.level for one in found} <= {"ok", "warn"}, found
    rules = [one.what for one in found]
    for rule in (
        "equal terms",
        "seeds",
        "controls",
        "method",
        "trials",
        "choices",
        "report",
        "commit",
        "data",
        "price",
    ):
        assert rules.count(rule) == 1, rule
    assert next(one.text for one in found if one.what == "method").startswith("mine: policy.0.name")


@pytest.mark.parametrize(
    ("old", "new", "rule", "text"),
    [
        ("report: 2-3", "report: 2", "seeds", "report must have the task's seeds 2, 3, got 2"),
        ("report: 2-3", "report: 7-8", "seeds", "report must have the task's seeds 2, 3, got 7, 8"),
        ("report: 2-3", "report: 2-4", "seeds", "report must have the task's seeds 2, 3, got 2, 3, 4"),
        ("tune: 0-1", "tune: 0", "seeds", "tune must have"),
        ("[5e-4, 1e-3]", "[5e-4, 1e-3, 2e-3]", "equal terms", "vary must be {training.learning_rate: [0.0005, 0.001]}"),
        ("steps: 20", "steps: 40", "equal terms", "budget must be {same: cost, as: dense, steps: 20}"),
        ("vary:", "shares: {mine: dense}\nvary:", "equal terms", "shares gives mine the values of dense"),
        (
            "dense: {}",
            "dense: {training.weight_decay: 0.1}",
            "controls",
            "dense differs from the task's arm in training.weight_decay",
        ),
        ("keep: 0.25}]}", "keep: 0.25}], training.optim: sgd}", "method", "mine changes training.optim; a method may"),
        ("keep: 0.25}]}", "keep: 0.25}], model.name: models/none}", "method", "mine changes model.name; a method may"),
        (
            "  mine:",
            "  many: {policy: [{name: random, keep: 0.25}]}\n  mine:",
            "methods",
            "many of the study: not among the methods of",
        ),
    ],
)
def test_a_rule_of_the_study_that_is_not_kept_is_named(place: Path, old: str, new: str, rule: str, text: str) -> None:
    change(place, old, new)
    assert failed(place)[rule].startswith(text)


def test_examples_of_another_digest_are_not_the_tasks(place: Path) -> None:
    change(place, "data: data", "data: other", "board/rules.yaml")
    assert failed(place) == {"data": "the digest of the examples is data, the task's is other"}


def test_a_trial_that_is_missing_is_named(place: Path) -> None:
    def edit(members: dict[str, bytes]) -> None:
        run = find_run(members, "tune", "mine")
        for name in [name for name in members if name.startswith(run)]:
            del members[name]

    edit_archive(place, edit)
    assert failed(place)["trials"].startswith("tune mine learning_rate=0.0005 seed 0: run ")


def test_a_journal_that_was_edited_is_found(place: Path) -> None:
    def edit(members: dict[str, bytes]) -> None:
        name = f"{find_run(members, 'report', 'mine')}/journal.jsonl"
        assert b'"test/loss": ' in members[name]
        members[name] = members[name].replace(b'"test/loss": ', b'"test/loss": 0')

    edit_archive(place, edit)
    assert "is not the one that was archived" in failed(place)["trials"]


@pytest.mark.parametrize(
    ("number", "edit", "text"),
    [
        (1, {"role": "report"}, "is listed as this trial, but the study needs it as another one"),
        (1, {"seed": 5}, "is listed as this trial, but the study needs it as another one"),
        (1, {"arm": "dense"}, "is listed as this trial, but the study needs it as another one"),
        (1, {"pruned": True}, "is listed as ended by halving"),
        (1, {"role": "control"}, "but the study does not need this trial"),
        (2, {}, "is listed 2 times"),
        (0, {}, "is in the archive, but the list of trials has no such entry"),
    ],
)
def test_a_list_of_trials_is_not_believed(place: Path, number: int, edit: dict[str, object], text: str) -> None:
    def change_list(members: dict[str, bytes]) -> None:
        record = json.loads(members["studies/mine.json"])
        first = next(one for one in record["trials"] if (one["role"], one["arm"]) == ("tune", "mine"))
        at = record["trials"].index(first)
        record["trials"][at : at + 1] = [first | edit] * number
        members["studies/mine.json"] = json.dumps(record).encode()

    edit_archive(place, change_list)
    assert text in failed(place)["trials"]


def test_only_the_first_training_of_a_study_counts(place: Path) -> None:
    def repeat(members: dict[str, bytes]) -> None:
        members["studies/mine.json"] = members["studies/mine.json"].replace(b'"generation": 0', b'"generation": 2')

    edit_archive(place, repeat)
    assert "the study was trained 3 times" in failed(place)["first results"]


def rewrite(members: dict[str, bytes], run: str, old: bytes, new: bytes) -> None:
    """Edit a journal, and its digest with it."""
    name = f"{run}/journal.jsonl"
    assert old in members[name]
    members[name] = members[name].replace(old, new)
    record = json.loads(members["studies/mine.json"])
    record["digests"][run.removeprefix("runs/")] = hashlib.sha256(members[name]).hexdigest()
    members["studies/mine.json"] = json.dumps(record).encode()


def test_a_run_that_spent_more_than_its_budget_is_refused(place: Path) -> None:
    def spend(members: dict[str, bytes]) -> None:
        rewrite(members, find_run(members, "report", "mine"), b'"flops/step": ', b'"flops/step": 9')

    edit_archive(place, spend)
    assert "spent" in failed(place)["budget"]


def test_a_budget_that_is_not_the_tasks_is_refused(place: Path) -> None:
    change(place, "{data: data}", "{data: data, flops: 1.0e+3}", "board/rules.yaml")
    assert "the task's budget is 1000" in failed(place)["budget"]


def test_a_run_that_diverged_counts_and_one_that_failed_is_missing(place: Path) -> None:
    def end(members: dict[str, bytes], text: bytes) -> None:
        run = find_run(members, "report", "mine")
        rewrite(members, run, b'"status": "finished"', b'"status": "failed", "cause": "' + text + b'"')
        rewrite(members, run, b'"text": ""}', b'"text": "' + text + b'"}')

    whole = (place / "mine" / "study.tar.gz").read_bytes()
    edit_archive(place, lambda members: end(members, b"diverged"))
    found = next(one for one in check(place) if one.what == "report")
    assert (found.level, found.text) == ("ok", "3 runs have finished, 1 diverged")
    (place / "mine" / "study.tar.gz").write_bytes(whole)
    edit_archive(place, lambda members: end(members, b"error"))
    assert failed(place)["report"] == "mine seed 2 has not finished"


def test_a_report_without_the_test_split_is_refused(place: Path) -> None:
    edit_archive(place, lambda m: rewrite(m, find_run(m, "report", "mine"), b'"test/loss"', b'"text/loss"'))
    assert "has no loss on the test split" in failed(place)["report"]


def test_runs_that_say_nothing_of_their_commit_are_not_mixed_with_others(place: Path) -> None:
    edit_archive(place, lambda m: rewrite(m, find_run(m, "report", "mine"), b'"torch": ', b'"torsh": '))
    assert failed(place)["code"].startswith("a trial does not record its code versions: report mine")


def test_runs_of_a_checkout_with_changes_and_of_two_commits_are_refused(place: Path) -> None:
    def edit(members: dict[str, bytes], key: str, value: str) -> None:
        name = f"{find_run(members, 'report', 'mine')}/plan.json"
        plan = json.loads(members[name])
        plan["provenance"][key] = value
        members[name] = json.dumps(plan).encode()

    whole = (place / "mine" / "study.tar.gz").read_bytes()
    edit_archive(place, lambda members: edit(members, "git_diff_sha256", "a" * 64))
    assert failed(place) == {"commit": "uncommitted changes: report mine learning_rate=0.001 seed 2"}
    (place / "mine" / "study.tar.gz").write_bytes(whole)
    edit_archive(place, lambda members: edit(members, "git_sha", "a" * 40))
    assert failed(place)["commit"].startswith("trials are of 2 commits: ")


def test_what_a_submission_does_not_say_is_one_line_with_its_place(place: Path) -> None:
    change(place, "licence: Apache-2.0\n", "", "mine/submission.yaml")
    done = COMMAND.run("leaderboard", "check", "mine", "--rules", "board", cwd=place)
    assert done.returncode == 2
    assert done.stderr.startswith("error: mine/submission.yaml:1:1: licence: ")
    change(place, "methods: [mine]", "methods: [theirs]\nlicence: MIT\narchive: ../x.tar.gz", "mine/submission.yaml")
    assert "archive: " in COMMAND.run("leaderboard", "check", "mine", "--rules", "board", cwd=place).stderr


def test_nothing_of_a_study_that_is_refused_is_trained(place: Path) -> None:
    change(place, "report: 2-3", "report: 2-4")
    done = COMMAND.run("leaderboard", "check", "mine", "--rules", "board", "-o", "json", "--rerun", "1", cwd=place)
    assert (done.returncode, read_document(done.stdout)["cells"]) == (1, [])
    (place / "mine" / "study.tar.gz").unlink()
    done = COMMAND.run("leaderboard", "check", "mine", "--rules", "board", "--rerun", "1", cwd=place)
    assert done.returncode == 1
    assert "Errno" not in done.stderr


def test_cells_are_drawn_at_random_and_trained_again(place: Path) -> None:
    words = ("leaderboard", "check", "mine", "--rules", "board", "-o", "json")
    document = read_document(COMMAND.run(*words, "--rerun", "1", cwd=place).stdout)
    assert (document["kind"], document["is_accepted"]) == ("submission", True), document["checks"]
    (cell,) = document["cells"]
    assert cell["again"] == cell["archived"]
    assert cell["is_equal"]
    assert document["checks"][-1]["what"] == "trained again"

    def edit(members: dict[str, bytes]) -> None:
        """Every number is as good as can be, and so is the list of digests: only training tells."""
        record = json.loads(members["studies/mine.json"])
        for trial in record["trials"]:
            name = f"runs/{trial['run_id']}/journal.jsonl"
            members[name] = (
                members[name]
                .replace(b'"test/loss": ', b'"test/loss": 1')
                .replace(b'"eval/loss": 3.', b'"eval/loss": 2.')
            )
            record["digests"][trial["run_id"]] = hashlib.sha256(members[name]).hexdigest()
        members["studies/mine.json"] = json.dumps(record).encode()

    edit_archive(place, edit)
    done = COMMAND.run(*words, "--rerun", "1", cwd=place)
    document = read_document(done.stdout)
    assert (done.returncode, document["is_accepted"]) == (1, False)
    assert [one["what"] for one in document["checks"] if one["level"] == "fail"] == ["trained again"]
    assert not document["cells"][0]["is_equal"]


def test_what_is_drawn_nobody_knows_and_what_is_allowed_follows_from_the_seeds(place: Path) -> None:
    from sparsebp_cli.compare.archive import open_archive

    file = place / "mine" / "study.tar.gz"
    mine, archive = load_study(place / "mine" / "study.yaml"), open_archive(file)
    record = find_archived("mine", archive)
    runs = read_runs(record, archive)
    draws = [[one.archived.trial.run_id for one in draw_cells(mine, record, archive, runs, 4)] for _ in range(20)]
    assert all(len({*draw}) == 4 for draw in draws)
    assert len({*map(tuple, draws)}) > 1  # 20 equal draws of 4 out of 12 cells: less than once in 10 ** 50
    # The worker's losses have 0.01 from seed to seed.
    assert pooled_spread(runs, "eval/loss") == pytest.approx(0.01 / 2**0.5)
    assert 0.0 < ALLOWED < 1.0


def test_a_task_of_ours_is_checked_by_its_name(place: Path) -> None:
    done = COMMAND.run("leaderboard", "check", "tiny", "--rules", "board", cwd=place)
    assert done.returncode == 1
    assert "tiny.tar.gz" in done.stdout
    assert (
        "no task 'tinny'; its tasks are tiny"
        in COMMAND.run("leaderboard", "check", "tinny", "--rules", "board", cwd=place).stderr
    )
    listed = read_document(COMMAND.run("leaderboard", "--rules", "board", "-o", "json", cwd=place).stdout)
    assert [task["name"] for task in listed["tasks"]] == ["tiny"]
