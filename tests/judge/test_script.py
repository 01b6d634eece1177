"""A user's own script as a candidate: a command at two commits."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from sparsebp_cli.cli.app import main
from sparsebp_cli.errors import UsageError
from sparsebp_lab.judge.ledger import Ledger
from sparsebp_lab.judge.script import Script, ScriptProposal, ScriptRepository, parse_metric
from sparsebp_lab.judge.script_arms import ScriptArms

from ..plan.test_provenance import ways_in
from .conftest import Cli, Start
from .script_material import COMMAND, METRIC, FileRun, git, make_repository, read_log

WORDS = ("--against", "base", "--script", COMMAND, "--metric", METRIC, "--budget", "1h")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = make_repository(tmp_path / "mine", base={}, better={"gain": 0.3}, null={"gain": 1e-9}, dead={"code": 3})
    monkeypatch.chdir(found)
    monkeypatch.setattr("sparsebp_lab.judge.script_arms.ScriptRun", FileRun)
    return found


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sparsebp", "judge", *words])
    monkeypatch.setattr("sparsebp_lab.verb.judge.POLL_SECONDS", 0.02)
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.slow
def test_a_better_commit_is_kept_and_the_repository_stays_as_it_is(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = git(repository, "status", "--porcelain"), git(repository, "worktree", "list"), git(repository, "branch")
    assert call(monkeypatch, "better", *WORDS, "--worst", "0.6", "-o", "json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["outcome"], told["equal"], told["metric"], told["better"]) == (
        "better", "command", "val_loss", "lower",
    )  # fmt: skip
    assert set(told["seconds_per_run"]) == {"baseline", "candidate"}
    assert told["spent"]["flops"] == 0.0
    runs = read_log(tmp_path)
    assert len(runs) == told["spent"]["runs"] == len({(gain, seed) for gain, seed, _, _ in runs})
    assert all(not Path(folder).exists() and Path(folder).name == "checkout" for _, _, folder, _ in runs)
    pairs = [look["gain"] for look in told["looks"]["pairs"]]
    assert sum(pairs) / len(pairs) == pytest.approx(0.3, abs=0.1)
    assert before == (
        git(repository, "status", "--porcelain"), git(repository, "worktree", "list"), git(repository, "branch"),
    )  # fmt: skip
    # The same files under another name are the same question.
    git(repository, "tag", "renamed", "better")
    assert call(monkeypatch, "renamed", *WORDS, "--worst", "0.6", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["question"] == told["question"]
    assert len(read_log(tmp_path)) == len(runs)
    # Another candidate has its screen beside the baseline's runs, which are there.
    assert call(monkeypatch, "null", *WORDS) == 11
    assert "mean time of a run" in capsys.readouterr().out
    again = [seed for gain, seed, _, _ in read_log(tmp_path)[len(runs) :] if gain == 0.0]
    assert set(again).isdisjoint(seed for gain, seed, _, _ in runs if gain == 0.0)


def rest() -> None:
    time.sleep(0.02)


def make_arms(candidate: str, metric: str = METRIC, command: str = COMMAND) -> ScriptArms:
    script = Script(command, ScriptRepository.find(Path.cwd()))
    return ScriptArms(ScriptProposal(script, script.at(candidate), script.at("base"), parse_metric(metric)))


def test_a_run_that_fails_or_says_nothing_of_the_metric_is_no_result(repository: Path) -> None:
    dead = make_arms("dead")
    trial = dead.make_trial("candidate", 1)
    dead.train([trial], rest)
    (line,) = dead.find_unfinished([trial])
    assert line == f"the run of the candidate (seed 1) ended with exit code 3: see {trial.folder / 'output.log'}"
    assert not dead.is_done(trial)
    other = make_arms("better", "val_los:lower")
    trial = other.make_trial("candidate", 1)
    other.train([trial], rest)
    (line,) = other.find_unfinished([trial])
    assert line.endswith("wrote val_loss, and no metric val_los; did you mean val_loss?")


def test_another_metric_or_direction_is_another_question_of_the_same_runs(repository: Path, tmp_path: Path) -> None:
    first, turned, other = (make_arms("better", metric) for metric in (METRIC, "val_loss:higher", "else:lower"))
    assert len({arms.proposal.digest for arms in (first, turned, other)}) == 3
    trial = first.make_trial("candidate", 1)
    first.train([trial], rest)
    assert turned.read(trial) == first.read(trial)
    assert (turned.is_done(trial), other.is_done(trial), other.read(trial)) == (True, False, None)
    assert len(read_log(tmp_path)) == 1


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e200"])  # the last one's square is infinite
def test_a_metric_that_is_not_finite_is_a_run_that_diverged(repository: Path, value: str) -> None:
    git(repository, "checkout", "--quiet", "-b", "nan", "base")
    (repository / "what.json").write_text(json.dumps({"gain": 0, "value": value}))
    git(repository, "commit", "--quiet", "-am", "nan")
    arms = make_arms("nan")
    trial = arms.make_trial("candidate", 1)
    arms.train([trial], rest)
    assert (arms.is_done(trial), arms.has_diverged(trial), arms.read(trial)) == (True, True, None)


def test_the_command_runs_in_the_folder_where_it_was_typed(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (repository / "sub folder").mkdir()
    for name in ("train.py", "what.json"):
        (repository / "sub folder" / name).write_bytes((repository / name).read_bytes())
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "below")
    monkeypatch.chdir(repository / "sub folder")
    arms = make_arms("HEAD")
    trial = arms.make_trial("candidate", 5)
    arms.train([trial], rest)
    (run,) = read_log(tmp_path)
    assert (run[1], Path(run[2]).name) == (5, "sub folder")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*WORDS,), "judge with --script needs a candidate: a branch, tag or commit"),
        (("better", *WORDS[:4], "--budget", "1h"), "needs --metric NAME:lower or NAME:higher"),
        (("better", *WORDS[:4], "--metric", "val_loss", "--budget", "1h"), "must be NAME:lower or NAME:higher"),
        (("beter", *WORDS), "has no branch, tag or commit 'beter'; did you mean better?"),
        (("base", *WORDS), "candidate base and baseline base are identical"),
        (("better", *WORDS, "--set", "a=1"), "--set works only with recipes"),
        (("better", *WORDS, "--equal", "steps"), "--equal works only with recipes"),
        (("better", *WORDS[:6], "--final"), "--final works only with recipes"),
        (("better", *WORDS[:7], "3e15"), "with --script, --budget must be a time"),
        (("better", "--against", "base", "--metric", METRIC, "--budget", "1h"), "--metric works only with --script"),
        (("better", *WORDS, "--script", "python train.py"), "--script must contain {seed} in place of the seed"),
        (("better", *WORDS, "--script", "python 'train.py {seed}"), "into words (No closing quotation)"),
        (("better", *WORDS, "--script", "./missing {seed}"), "--script: ./missing cannot be started at commit"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    assert call(monkeypatch, *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.promise("R20")
@pytest.mark.parametrize(
    "way", [way for way in ways_in(Path("/x"), Path("/y")) if way not in {"submodule", "lazy fetch"}]
)
def test_nothing_that_a_repository_configures_is_run(
    way: str, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (repository / "settings.ini").write_text("a = 1")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "settings")
    ways_in(repository, tmp_path / "canary")[way]()
    (repository / "settings.ini").write_text("changed")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}::.")
    assert call(monkeypatch, "better", *WORDS[:6]) == 2
    assert "--budget" in capsys.readouterr().err
    script = Script(COMMAND, ScriptRepository.find(Path.cwd()))
    side = script.at("better")
    script.repository.check_out(side.commit, tmp_path / "out")
    assert (tmp_path / "out" / "train.py").exists()
    assert script.repository.has_changes
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name", ["GIT_DIR", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY", "GIT_INDEX_FILE", "GIT_NAMESPACE"]
)
def test_no_variable_of_git_leads_to_another_repository(
    name: str, repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = make_repository(tmp_path / "other", base={"gain": 7}, better={"gain": 8})
    sides = [make_arms(side).proposal.candidate for side in ("better", "null")]
    value = "x" if name == "GIT_NAMESPACE" else str(other / ".git")
    monkeypatch.setenv(name, value)
    assert [make_arms(side).proposal.candidate for side in ("better", "null")] == sides
    script = Script(COMMAND, ScriptRepository.find(Path.cwd()))
    script.repository.check_out(sides[0].commit, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "what.json").read_text())["gain"] == 0.3


def test_a_script_cannot_move_the_references_that_its_checkout_copied(repository: Path, tmp_path: Path) -> None:
    git(repository, "tag", "v1", "base")
    before = git(repository, "for-each-ref")
    script = Script(COMMAND, ScriptRepository.find(Path.cwd()))
    script.repository.check_out(script.at("better").commit, tmp_path / "out")
    assert git(tmp_path / "out", "rev-parse", "v1") == git(repository, "rev-parse", "base")
    git(tmp_path / "out", "tag", "--delete", "v1")
    git(tmp_path / "out", "branch", "--force", "base", "better")
    git(tmp_path / "out", "commit", "--quiet", "--allow-empty", "-m", "more")
    assert git(repository, "for-each-ref") == before


def test_words_of_a_user_are_no_options_of_git(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No option of git 2.39 does harm in this place; those of another version are not known."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(f'#!/bin/sh\nprintf "%s " "$@" >> {tmp_path}/asked\nexit 1\n')
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert call(monkeypatch, *WORDS, "--", "--output=x") == 2
    words = (tmp_path / "asked").read_text().split()
    assert "--end-of-options" in words[: words.index("--output=x^{commit}")]


def test_the_folder_in_which_a_command_runs_is_part_of_the_question(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_arms("better").proposal.digest
    (repository / "below").mkdir()
    monkeypatch.chdir(repository / "below")
    assert make_arms("better").proposal.digest != first


def test_files_that_only_a_filter_would_fetch_are_refused(repository: Path) -> None:
    (repository / ".gitattributes").write_text("*.bin filter=lfs\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "none yet")
    assert make_arms("HEAD").proposal.candidate.commit
    (repository / "w.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    git(repository, "-c", "filter.lfs.clean=cat", "add", ".")
    git(repository, "commit", "--quiet", "-m", "weights")
    with pytest.raises(UsageError, match="has files in git-lfs, which judge does not check out"):
        make_arms("HEAD")


def test_a_folder_without_a_repository_and_submodules_are_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = make_repository(tmp_path / "other", base={})
    git(repository, "submodule", "--quiet", "add", str(other), "part of it")
    git(repository, "commit", "--quiet", "-m", "part")
    assert call(monkeypatch, "HEAD", *WORDS) == 2
    assert "has submodules, which judge does not check out" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    monkeypatch.chdir(tmp_path / "none")
    assert call(monkeypatch, "better", *WORDS) == 2
    assert "repository, but " + str(tmp_path / "none") + " is not in one" in " ".join(capsys.readouterr().err.split())


def test_changes_that_no_commit_has_are_said(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "train.py").write_text("an edit")
    assert call(monkeypatch, "dead", *WORDS) == 100
    assert "note: judge ignores uncommitted changes" in capsys.readouterr().err


def _wait_for_run(folder: Path, count: int = 1) -> tuple[float, int, str, int]:
    pause = time.monotonic() + 120
    while len(read_log(folder)) < count:
        assert time.monotonic() < pause
        time.sleep(0.02)
    return read_log(folder)[count - 1]


@pytest.mark.slow
def test_a_script_outlives_no_judge_for_long(repository: Path, start: Start, cli: Cli, tmp_path: Path) -> None:
    """A judge that is killed leaves its script; the same command ends it and runs it again, and a signal ends both."""
    words = ("judge", "better", *WORDS, "--worst", "0.6", "-o", "json")
    (tmp_path / "hold").touch()
    judge = start(*words, cwd=repository)
    left = _wait_for_run(tmp_path)[3]
    os.kill(judge.pid, signal.SIGKILL)
    judge.wait()
    assert psutil.pid_exists(left)
    judge = start(*words, cwd=repository)
    second = _wait_for_run(tmp_path, 2)
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
    assert read_log(tmp_path)[0][1] == second[1]
    judge.send_signal(signal.SIGINT)
    out, err = judge.communicate(timeout=120)
    told = json.loads(out)
    assert (judge.returncode, told["exit_code"], told["outcome"]) == (130, 130, "not shown")
    assert "stopping the running trials; run the same command again to continue" in err
    assert not psutil.pid_exists(second[3])
    (tmp_path / "hold").unlink()
    done = cli(*words, cwd=repository)
    assert (done.returncode, json.loads(done.stdout)["outcome"]) == (0, "better"), done.stderr
    (question,) = Ledger().read().questions.values()
    numbers = [look.number for look in question.looks["pairs"]]
    assert numbers == [*range(1, len(numbers) + 1)]
    finished = [run[:2] for run in read_log(tmp_path)[2:]]
    assert len(finished) == len(set(finished)) == question.spent["runs"]


@pytest.mark.slow
def test_two_judges_run_a_seed_of_their_baseline_once(repository: Path, start: Start, tmp_path: Path) -> None:
    judges = [start("judge", name, *WORDS, "-o", "json", cwd=repository) for name in ("better", "null")]
    ends = [(judge.communicate(timeout=300)[0], judge.returncode) for judge in judges]
    assert [code for _, code in ends] == [0, 11]
    runs = [run[:2] for run in read_log(tmp_path)]
    assert len(runs) == len(set(runs)) == sum(json.loads(out)["spent"]["runs"] for out, _ in ends)


WRITES = """\
import sys
import mlflow
with mlflow.start_run(run_name="its own") as run:
    for step in range(3):
        mlflow.log_metric("val_loss", 3.0 - step + int(sys.argv[1]), step=step)
"""


@pytest.mark.slow
def test_what_a_script_writes_into_mlflow_is_read(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    from sparsebp_cli.tracking import resolve_uri
    from sparsebp_lab.judge.script_run import ScriptRun

    monkeypatch.setattr("sparsebp_lab.judge.script_arms.ScriptRun", ScriptRun)
    (repository / "train.py").write_text(WRITES)
    git(repository, "commit", "--quiet", "-am", "mlflow")
    arms = make_arms("HEAD", command=f"{sys.executable} train.py {{seed}}")
    trial = arms.make_trial("candidate", 7)
    arms.train([trial], rest)
    assert arms.find_unfinished([trial]) == []
    assert arms.read(trial) == 8.0
    client = MlflowClient(resolve_uri(None))
    (experiment,) = client.search_experiments(filter_string="name = 'judge'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.tags["seed"]) == ("FINISHED", "7")
    assert [point.step for point in client.get_metric_history(run.info.run_id, "val_loss")] == [0, 1, 2]
