"""``sparsebp compare`` on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sparsebp_cli.run import JournalWriter, RunFolder, list_runs

from .conftest import Cli, Write, write_run

WIDTH = 100


@pytest.fixture
def study(write_recipe: Write) -> list[RunFolder]:
    """Three seeds of dense and of topk, whose loss is larger by about 0.1."""
    runs = []
    for seed in range(3):
        for name, change, extra in (("dense", "policy=dense", 0.0), ("sparse", "policy.0.keep=0.1", 0.1)):
            run = write_run(write_recipe(name=name), change, f"training.seed={seed}")
            with JournalWriter(run.path) as journal:
                journal.write("attempt", from_step=3, environment={})
                journal.write("metrics", step=4, values={"eval/loss": 3.0 + extra + 0.001 * seed * (extra + 1)})
                journal.write("end", status="finished", step=4, text="")
            runs.append(run)
    return runs


def test_everything_fits_100_columns(call: Cli, study: list[RunFolder]) -> None:
    done = call("compare", "dense", "sparse", "--margin", "eval/loss=0.2", "--all")
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith("sparsebp ")]  # to be copied
    assert max(map(len, lines)) <= WIDTH
    for text in ("not worse by more than 0.2?", "+0.100", "yes"):
        assert text in done.stdout


def test_a_condition_chooses_and_without_words_or_condition_nothing_is_compared(
    call: Cli, study: list[RunFolder]
) -> None:
    done = call("compare", "--where", "policy=dense and seed<2", "-o", "json")
    assert [run["seed"] for run in json.loads(done.stdout)["runs"]] == [0, 1]
    refused = call("compare")
    assert (refused.returncode, refused.stderr) == (
        2,
        "error: name the runs to compare, or select runs by --where; `sparsebp runs` lists all runs\n",
    )
    assert call("compare", "--where", "keep>0.5").returncode == 102


def test_runs_of_another_machine_are_read_from_their_folder(call: Cli, study: list[RunFolder], tmp_path: Path) -> None:
    here = call("compare", "dense", "sparse", "-o", "json").stdout
    shutil.move(study[0].path.parent, tmp_path / "copied")
    assert list_runs() == []
    assert call("compare", "dense", "sparse", "--from", "copied", "-o", "json").stdout == here
    everything = json.loads(call("compare", "--from", "copied", "-o", "json").stdout)
    assert len(everything["runs"]) == 6
    wrong = call("compare", "dense", "--from", "nowhere")
    assert wrong.stderr == "error: --from must be a folder of runs or an archive, got 'nowhere'\n"


@pytest.mark.parametrize("verb", ["compare", "show"])
@pytest.mark.parametrize("word", ["dense", "@study"])
def test_an_mlflow_store_is_answered_in_one_line(call: Cli, study: list[RunFolder], verb: str, word: str) -> None:
    done = call(verb, word, "--from", "postgresql://me:CANARY@host/mlflow")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --from must be a folder of runs or an archive, got 'postgresql://***@host/mlflow'; runs cannot be "
        "read from MLflow: write an archive with `sparsebp archive` on the machine of the runs\n",
    )


@pytest.mark.parametrize("damage", ["schema", "key", "version", "json"])
def test_a_run_that_this_version_cannot_read_is_one_warning(call: Cli, study: list[RunFolder], damage: str) -> None:
    plan = json.loads(study[0].plan_file.read_text())
    match damage:
        case "schema":
            plan["format"] = 7
        case "key":
            del plan["recipe"]["model"]
        case "version":
            plan["recipe"]["training"]["of_tomorrow"] = 1
            plan["provenance"]["sparsebp_version"] = "99.0"
        case "json":
            plan = {"other": 1}
    study[0].plan_file.write_text(json.dumps(plan))
    named, lost = [run.run_id for run in study], study[0].run_id
    for words in (named, ["--from", str(study[0].path.parent)]):
        done = call("compare", *words, "-o", "json")
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        assert {run["run_id"] for run in found["runs"]} == {*named[1:]}
        (told,) = (line for line in found["warnings"] if lost in line)
        assert told.startswith(f"run {lost} is left out: {study[0].plan_file} is not a plan for this version: ")
        assert told.endswith("sparsebp 99.0 made it, but this is sparsebp " + told.rpartition(" ")[2]) == (
            damage == "version"
        )
    alone = call("compare", lost)
    assert (alone.returncode, alone.stdout, alone.stderr.count("\n")) == (102, "", 1)
    assert alone.stderr.startswith(f"error: run {lost} cannot be read: {study[0].plan_file} is not a plan")


def test_a_gate_ends_with_1_and_says_why(call: Cli, study: list[RunFolder]) -> None:
    shut = call("compare", "dense", "sparse", "--fail-if", "eval/loss.delta.high > 0.02")
    assert shut.returncode == 1
    assert "sparse: eval/loss is worse by 0.1" in shut.stdout
    assert shut.stderr.startswith("failed: sparse: eval/loss.delta.high is 0.1")
    assert call("compare", "dense", "sparse", "--fail-if", "eval/loss.delta.high > 0.2").returncode == 0
    wrong = call("compare", "dense", "sparse", "--fail-if", "eval/loss.delta.hih > 0.2")
    assert (wrong.returncode, wrong.stdout) == (2, "")


def test_the_report_is_written(call: Cli, study: list[RunFolder], tmp_path: Path) -> None:
    done = call("compare", "dense", "sparse", "--html", "a.html")
    assert done.stderr == "report: a.html\n"
    assert "sparsebp compare dense sparse --html a.html" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--margin", "eval/loss"], "--margin must be a number above 0"),
        (["--margin", "eval/loss=1", "--metric", "train/loss"], "--margin names eval/loss, but --metric is train/loss"),
        (["--where", "keep<"], "--where: expected a value"),
    ],
)
def test_wrong_options_are_answered_in_one_line(
    call: Cli, study: list[RunFolder], options: list[str], says: str
) -> None:
    done = call("compare", "dense", "sparse", *options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {says}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_whoever_chooses_runs_by_how_they_ended_is_told_so(call: Cli, study: list[RunFolder]) -> None:
    told = "--where selects runs by outcome (eval/loss, state), which biases all numbers shown here"
    where = "eval/loss<3.05 and not state=failed"
    assert told in json.loads(call("compare", "--where", where, "-o", "json").stdout)["warnings"]
    assert json.loads(call("compare", "--where", "seed<9", "-o", "json").stdout)["warnings"] == []


def test_a_terminal_without_the_letters_is_shown_the_rest(cli: Cli, study: list[RunFolder]) -> None:
    done = cli("compare", "dense", "sparse", "--all", real=True, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3.0010 ? 0.0010 (3)" in done.stdout


def end_all(state: str) -> None:
    """Write another end into every run's journal."""
    for run in list_runs():
        journal = run.path / "journal.jsonl"
        journal.write_text(journal.read_text().replace('"finished"', f'"{state}"'))


@pytest.mark.parametrize("baseline", [[], ["--baseline", "dense"]])
def test_runs_that_all_failed_are_shown_and_end_with_100(call: Cli, two_runs: None, baseline: list[str]) -> None:
    end_all("failed")
    for words, shown in (([], "left out: "), (["--all"], "Runs that no mean includes")):
        done = call("compare", "@2", *baseline, *words)
        assert done.returncode == 100
        assert shown in done.stdout
    lost = [f"failed: {name}: no run of this group finished, so it was not compared" for name in ("dense", "topk-rows")]
    assert sorted(done.stderr.splitlines()) == lost


def test_a_group_of_which_one_run_finished_is_compared(call: Cli, study: list[RunFolder]) -> None:
    for run in study[:4]:  # two of the three seeds of both
        journal = run.path / "journal.jsonl"
        journal.write_text(journal.read_text().replace('"finished"', '"failed"'))
    done = call("compare", "dense", "sparse")
    assert (done.returncode, done.stderr) == (0, "")
