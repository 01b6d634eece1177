"""``runs`` with a condition, an order and columns; ``tag`` and ``note``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, RunFolder, State, create_run, home
from sparsebp_cli.run.label import Labels
from sparsebp_cli.target.archive import merge_into_run
from sparsebp_cli.tracking.content import tags
from sparsebp_lab.study.record import StudyRecord

from .conftest import Cli, Write, write_run


@pytest.fixture
def three(write_recipe: Write) -> list[RunFolder]:
    """Two seeds of topk, the second with more steps; then dense."""
    topk, dense = write_recipe(name="topk"), write_recipe(name="dense")
    return [
        write_run(topk),
        write_run(topk, "training.seed=1", max_steps=6),
        write_run(dense, "policy=dense", "training.learning_rate=0.5"),
    ]


def list_ids(call: Cli, *words: str) -> list[str]:
    done = call("runs", *words, "-o", "json")
    assert done.returncode == 0, done.stderr
    return [line["run_id"] for line in json.loads(done.stdout)["runs"]]


def test_a_condition_chooses_runs_and_an_order_sorts_them(call: Cli, three: list[RunFolder]) -> None:
    first, second, dense = (run.run_id for run in three)
    assert list_ids(call) == [dense, second, first]
    assert list_ids(call, "--where", "policy=topk") == [second, first]
    assert list_ids(call, "--where", "policy == topk and seed = 1") == [second]
    assert list_ids(call, "--where", "eval/loss < 3.9") == [second]
    assert list_ids(call, "--where", "state=failed") == []
    assert list_ids(call, "--sort", "eval/loss")[0] == second
    assert list_ids(call, "--sort", "-training.learning_rate")[0] == dense
    assert list_ids(call, "--sort", "-keep")[-1] == dense  # it has none
    assert list_ids(call, "--sort", "-step", "--limit", "1") == [second]


def test_the_table_has_the_columns_that_are_asked_for(call: Cli, three: list[RunFolder]) -> None:
    done = call("runs", "--columns", "run,seed,learning_rate,eval/loss")
    assert done.stdout.split("\n")[1].split() == ["run", "seed", "learning_rate", "eval/loss"]
    assert [three[2].run_id, "0", "0.5", "3.9806"] in [line.split() for line in done.stdout.splitlines()]
    lines = json.loads(call("runs", "--columns", "learning_rate", "-o", "json").stdout)["runs"]
    assert lines[0]["columns"]["learning_rate"] == 0.5
    assert lines[0]["seed"] == 0
    heading = call("runs").stdout.split("\n")[1].split()
    assert heading == ["run", "name", "policy", "seed", "state", "step", "eval/loss", "age"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--where", "lerning_rate<1"], "did you mean learning_rate?"),
        (["--where", "loss<3"], "did you mean eval/loss?"),
        (["--where", "seed"], "expected one of = != < <= > >= ~"),
        (["--columns", "sede"], "did you mean seed?"),
        (["--columns", ","], "--columns needs at least one column"),
        (["--sort", "-stat"], "did you mean state?"),
        (["--columns", "arm"], "no run has the column 'arm'"),
    ],
)
def test_a_name_that_no_run_has_is_refused_in_one_line(
    call: Cli, three: list[RunFolder], words: list[str], text: str
) -> None:
    done = call("runs", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("verb", ["show", "logs", "compare", "resume", "rm", "model"])
def test_a_word_that_can_be_no_name_of_a_file_names_no_run(call: Cli, three: list[RunFolder], verb: str) -> None:
    for word in ("\N{FOX FACE}" * 70, "a/" + "\N{FOX FACE}" * 70):
        done = call(verb, word)
        assert done.returncode in {2, 102}
        assert re.fullmatch(r"error: [^\n]*\N{FOX FACE}[^\n]*\n", done.stderr)


def test_every_line_of_the_list_fits_100_columns(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe(name="a-name-that-is-quite-long-for-a-table-of-100-columns"))
    Labels(("best", "the-main-figure-of-the-second-section"), "a note " * 40).save(run.path)
    for words in ([], ["--columns", "run,name,policy,tags,note,folder"]):
        assert max(map(len, call("runs", *words).stdout.splitlines())) <= 100


def test_the_trials_of_a_study_are_listed_by_arm(call: Cli, three: list[RunFolder]) -> None:
    (home() / "studies").mkdir()
    trials = [
        {"run_id": run.run_id, "role": "report", "arm": arm, "combination": "", "seed": 0}
        for run, arm in ((three[0], "sparse"), (three[2], "exact"))
    ]
    content = {"study": "rows", "file": "study.yaml", "generation": 0, "trials": trials}
    (home() / "studies" / "rows.json").write_text(json.dumps(content))
    assert list_ids(call, "--study", "rows", "--sort", "arm") == [three[2].run_id, three[0].run_id]
    assert "sparse" in call("runs", "--study", "rows").stdout
    assert list_ids(call, "--study", "rows", "--where", "policy=topk") == [three[0].run_id]
    assert "did you mean rows?" in call("runs", "--study", "row").stderr
    assert call("tag", "dense", "rows").returncode == 2


def test_a_tag_names_its_runs_in_every_command(call: Cli, three: list[RunFolder]) -> None:
    first, second, dense = (run.run_id for run in three)
    done = call("tag", first, dense, "best")
    assert (done.returncode, done.stdout) == (0, "2 runs tagged: @best\n")
    assert list_ids(call, "--where", "tag=best") == [dense, first]
    assert json.loads(call("show", "@best", "-o", "json").stdout)["labels"]["tags"] == ["best"]
    compared = json.loads(call("compare", "@best", "-o", "json").stdout)
    assert {run["run_id"] for run in compared["runs"]} == {first, dense}
    assert call("runs").stdout.count("best") == 2
    call("tag", dense, "best", "--remove")
    assert list_ids(call, "--where", "tag=best") == [first]
    done = call("show", "@bets")
    assert (done.returncode, done.stderr.count("\n")) == (102, 1)
    assert second not in list_ids(call, "--where", "tag~b*")


def test_a_word_that_is_a_study_too_means_the_same_in_every_command(call: Cli, three: list[RunFolder]) -> None:
    StudyRecord("first", "study.yaml", 0).save()
    assert "study first has no report" in call("compare", "@first").stderr
    assert call("tag", three[0].run_id, "best").returncode == 0
    for name in ("last", "best"):
        StudyRecord(name, "study.yaml", 0).save()
    for words in (["compare", "@best"], ["archive", "@best", "--to", "best.tar.gz"]):
        done = call(*words)
        assert (done.returncode, done.stderr.count("@best is the name of a study and also a tag")) == (2, 1)
    last = json.loads(call("compare", "@last", "-o", "json").stdout)
    assert [run["run_id"] for run in last["runs"]] == [three[2].run_id]


def test_watch_lists_once_where_no_terminal_shows_it(call: Cli, three: list[RunFolder]) -> None:
    assert call("runs", "--watch", "--columns", "run").stdout == call("runs", "--columns", "run").stdout


@pytest.mark.parametrize("name", ["last", "2", "a=b", "a b", "-x", "", "x" * 41])
def test_a_tag_that_could_mean_something_else_is_refused(call: Cli, three: list[RunFolder], name: str) -> None:
    done = call("tag", "dense", "--", name)
    assert done.returncode == 2
    assert done.stderr.startswith("error: a tag must be a letter")
    assert not (three[2].path / "labels.json").exists()


def test_a_tag_changes_no_other_file_and_a_note_of_an_earlier_version_stays(call: Cli, three: list[RunFolder]) -> None:
    run = three[0]
    before = {file.name: file.read_bytes() for file in run.path.iterdir()}
    digest = Plan.load(run.plan_file).group
    Labels(note="for the paper").save(run.path)
    assert call("tag", run.run_id, "seen").returncode == 0
    assert "note: for the paper" in call("show", run.run_id).stdout
    assert list_ids(call, "--where", "note~*paper*") == [run.run_id]
    after = {file.name: file.read_bytes() for file in run.path.iterdir()}
    assert {name: after[name] for name in before} == before
    assert Plan.load(run.plan_file).group == digest


def test_a_living_run_and_a_damaged_run_can_be_tagged(call: Cli, three: list[RunFolder]) -> None:
    alive, damaged = three[0], three[1]
    damaged.plan_file.write_text("{")
    with alive.lock("worker"):
        assert call("tag", alive.run_id, damaged.run_id, "odd").returncode == 0
    assert call("runs", "--where", "tag=odd").stdout.count("odd") == 2


def test_labels_that_are_damaged_count_as_none(call: Cli, three: list[RunFolder]) -> None:
    for content in ("{", "[]", '{"tags": [3], "note": ""}', '{"tags": 3, "note": null}'):
        (three[0].path / "labels.json").write_text(content)
        assert Labels.load(three[0].path) == Labels()
        assert call("runs").returncode == 0


def test_what_comes_from_another_machine_changes_no_labels(three: list[RunFolder], tmp_path: Path) -> None:
    Labels(("best",)).save(three[0].path)
    part = tmp_path / "part"
    (part / "run").mkdir(parents=True)
    Labels(("theirs",)).save(part / "run")
    merge_into_run(part, "run", three[0])
    assert Labels.load(three[0].path).tags == ("best",)


def test_a_store_has_the_labels(three: list[RunFolder]) -> None:
    plan, labels = Plan.load(three[0].plan_file), Labels(("best", "paper"), "a note")
    sent = tags(plan, History.load(three[0].path), State.FINISHED, labels)
    assert (sent["sparsebp.tags"], sent["sparsebp.note"]) == ("best,paper", "a note")


def test_a_folder_without_a_journal_is_listed(call: Cli, three: list[RunFolder]) -> None:
    plan = Plan.load(three[0].plan_file).model_copy(update={"run_id": "0123456789ab"})
    plan.save(create_run(plan.run_id).path)
    assert "0123456789ab" in list_ids(call, "--sort", "eval/loss")[-1]
