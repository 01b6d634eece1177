"""``sparsebp run`` and the verbs that keep a grip on what it started."""

from __future__ import annotations

import json
import os
import pty
import re
import struct
import subprocess
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import pytest
import yaml

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import State, list_runs

from .conftest import Cli, Write, write_run

WIDTH = 100


def test_a_run_shows_steps_and_a_summary_and_ends_with_0(cli: Cli, write_recipe: Write) -> None:
    done = cli("run", write_recipe())
    assert done.returncode == 0, done.stderr
    run = list_runs()[0]
    assert run.state() is State.FINISHED
    assert done.stdout.startswith(f"fake {run.run_id}: 30 steps")
    assert "step 20/30  loss 3.3333  eval 3.4167  kept 10 %  6,400 tokens/s" in done.stdout
    assert "eval loss  first 4.1000, last 3.1538" in done.stdout
    said = "about 1.50x as fast as dense (estimated from FLOPs of all steps, and time per FLOP in"
    assert said in " ".join(done.stdout.split())
    assert f"next: sparsebp show {run.run_id}" in done.stdout
    assert "\x1b" not in done.stdout


def test_plain_output_fits_100_columns(cli: Cli, write_recipe: Write) -> None:
    done = cli("run", write_recipe(name="n" * 64))
    lines = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith("nnn")]
    assert max(map(len, lines)) <= WIDTH


def test_a_tracking_store_that_cannot_be_used_is_one_warning(cli: Cli, write_recipe: Write) -> None:
    done = cli("run", write_recipe())
    assert done.returncode == 0
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["warning"]


def test_a_dry_run_prints_a_plan_and_the_command_and_writes_nothing(
    cli: Cli, write_recipe: Write, home_folder: Path
) -> None:
    done = cli("run", write_recipe(), "--dry-run", "--set", "training.max_steps=7", real=True)
    assert done.returncode == 0
    plan = Plan.model_validate(yaml.safe_load(done.stdout))
    assert plan.recipe.training.max_steps == 7
    assert done.stdout.splitlines()[-1].endswith(f"-m sparsebp_cli.worker {home_folder}/runs/{plan.run_id}/plan.json")
    assert not home_folder.exists()


def test_seeds_and_recipes_run_one_after_the_other(cli: Cli, write_recipe: Write) -> None:
    done = cli("run", write_recipe(name="a"), write_recipe(name="b"), "--seeds", "0-1", "--set", "training.max_steps=3")
    assert done.returncode == 0, done.stderr
    plans = [Plan.load(run.plan_file).recipe for run in list_runs()[::-1]]
    assert [(plan.name, plan.training.seed) for plan in plans] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [run.state() for run in list_runs()] == [State.FINISHED] * 4
    ids = " ".join(run.run_id for run in list_runs()[::-1])
    assert f"next: sparsebp compare {ids}" in " ".join(done.stdout.split())
    done = cli("run", write_recipe(name="c"), "--set", "training.max_steps=3")
    assert f"next: sparsebp show {list_runs()[0].run_id}" in done.stdout


def test_the_ids_of_the_runs_are_written_to_a_file(cli: Cli, write_recipe: Write, tmp_path: Path) -> None:
    three = ("--set", "training.max_steps=3")
    file = tmp_path / "ids"
    done = cli("run", write_recipe(name="a"), write_recipe(name="b"), "--ids", file, *three)
    assert done.returncode == 0, done.stderr
    own = [run.run_id for run in list_runs()[::-1]]
    assert file.read_text().split() == own
    cli("run", write_recipe(name="c"), *three)  # another run does not change what they name
    done = cli("compare", *file.read_text().split(), "-o", "json")
    assert [run["run_id"] for run in json.loads(done.stdout)["runs"]] == own
    done = cli("run", write_recipe(name="d"), "--ids", tmp_path / "nowhere" / "ids", *three)
    assert (done.returncode, len(list_runs())) == (2, 3)
    assert "--ids: cannot write" in done.stderr


def test_name_and_set_change_the_recipe(cli: Cli, write_recipe: Write) -> None:
    done = cli(
        "run", write_recipe(), "--name", "other", "--set", "policy.0.keep=0.5", "--set", "~tracking.uri", "--dry-run"
    )
    recipe = yaml.safe_load(done.stdout)["recipe"]
    assert (recipe["name"], recipe["policy"][0]["keep"], recipe["tracking"]["uri"]) == ("other", 0.5, None)


def test_detach_prints_ids_and_returns_at_once(cli: Cli, write_recipe: Write) -> None:
    done = cli("run", write_recipe("slow"), "--seeds", "0,1", "--detach")
    assert done.returncode == 0
    assert done.stdout.split() == [run.run_id for run in list_runs()[::-1]]
    assert not list_runs()[1].state().over
    assert list_runs()[0].state() is State.QUEUED
    assert cli("cancel", "@2").returncode == 0
    assert [run.state() for run in list_runs()] == [State.CANCELLED] * 2


@pytest.mark.parametrize(
    ("fake", "code", "reason"),
    [
        ("fail", 100, "RuntimeError: the fake broke"),
        ("silent", 100, "ImportError: no module named torch"),
        ("data-error", 100, "dataset.name: no such file: x.txt"),
    ],
)
def test_a_failed_run_gives_its_reason_in_one_line(
    cli: Cli, write_recipe: Write, fake: str, code: int, reason: str
) -> None:
    done = cli("run", write_recipe(fake))
    assert done.returncode == code
    run = list_runs()[0]
    assert f"error: run {run.run_id} failed: {reason}" in done.stderr.splitlines()
    assert "Traceback" not in done.stderr + done.stdout


def test_the_first_failure_of_several_runs_gives_the_exit_code(cli: Cli, write_recipe: Write) -> None:
    done = cli("run", write_recipe("data-error", "bad"), write_recipe("ok", "good"))
    assert done.returncode == 100
    assert [run.state() for run in list_runs()] == [State.FINISHED, State.FAILED]


def test_a_wrong_recipe_among_several_starts_none(cli: Cli, write_recipe: Write, home_folder: Path) -> None:
    good, bad = write_recipe(name="good"), write_recipe(name="bad")
    bad.write_text(bad.read_text().replace("max_steps", "max_stebs"))
    done = cli("run", good, bad)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {bad}:6:")
    assert "did you mean max_steps?" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not home_folder.exists()


def test_a_terminal_of_100_columns_shows_a_picture_that_fits(write_recipe: Write, tmp_path: Path) -> None:
    from .conftest import FAKE, environment

    leader, follower = pty.openpty()
    ioctl(follower, TIOCSWINSZ, struct.pack("HHHH", 30, WIDTH, 0, 0))
    environ = {key: value for key, value in environment().items() if key != "COLUMNS"} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        [*FAKE, "run", str(write_recipe("steady"))],
        stdin=follower,
        stdout=follower,
        stderr=subprocess.DEVNULL,
        env=environ,
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            shown += os.read(leader, 65536)
        except OSError:  # the other side was closed
            break
    os.close(leader)
    assert process.wait(60) == 0
    text = shown.decode()
    assert "\x1b[" in text
    assert "━" in text
    moves = re.sub(r"\x1b\[[0-9;]*m", "", text)  # colours take no room; what is left moves the cursor
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", moves).split("\n")
    assert max(map(len, lines)) <= WIDTH
    assert "forward 3.00 ms, backward 6.00 ms, optimizer 1.00 ms" in text
    assert "next: " in text


def test_show_gives_everything_as_json_and_the_recipe_as_yaml(call: Cli, write_recipe: Write) -> None:
    write_run(write_recipe(), max_steps=30)
    shown = json.loads(call("show", "@last", "-o", "json").stdout)
    assert shown["state"] == "finished"
    assert shown["metrics"]["train/loss"]["points"] == 30
    assert shown["metrics"]["eval/loss"]["first"] == pytest.approx(4.1 / 1.01)
    recipe = yaml.safe_load(call("show", "fake", "-o", "yaml").stdout)
    assert Plan.load(list_runs()[0].plan_file).recipe.model_dump(mode="json") == recipe
    people = call("show", "@last", "--all").stdout
    assert "eval loss  first 4.0594, last 3.1538" in people
    assert "max_steps: 30" in people


def test_compare_shows_two_policies(call: Cli, two_runs: None) -> None:
    done = call("compare", "@2")
    assert done.returncode == 0, done.stderr
    assert "topk-rows" in done.stdout
    assert max(len(line.rstrip()) for line in done.stdout.splitlines() if not line.startswith("sparsebp ")) <= WIDTH
    assert len(json.loads(call("compare", "dense", "topk-rows", "-o", "json").stdout)["groups"]) == 2


def test_a_stored_run_is_repeated_with_a_change_and_no_file_is_written(
    call: Cli, write_recipe: Write, tmp_path: Path
) -> None:
    first = write_run(write_recipe(name="mine"), "training.learning_rate=2e-5")
    (tmp_path / "mine.yaml").unlink()
    before = sorted(path.name for path in tmp_path.iterdir())
    done = call(
        "run", "--like", first.run_id, "--name", "dense", "--set", "policy=dense", "--seeds", "3,5", "--dry-run"
    )
    assert done.returncode == 0, done.stderr
    recipes = [part["recipe"] for part in yaml.safe_load_all(done.stdout.replace("\nformat:", "\n---\nformat:"))]
    assert [recipe["training"]["seed"] for recipe in recipes] == [3, 5]
    assert {recipe["name"] for recipe in recipes} == {"dense"}
    assert [recipe["policy"][0]["name"] for recipe in recipes] == ["dense", "dense"]
    assert recipes[0]["training"] == Plan.load(first.plan_file).recipe.model_dump(mode="json")["training"] | {"seed": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_run_takes_recipe_files_or_a_stored_run_and_says_so(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe())
    for words, got in ((("fake.yaml", "--like", run.run_id), "both"), ((), "neither")):
        done = call("run", *words)
        assert done.returncode == 2
        assert f"run needs recipe files, or --like RUN for the recipe of a stored run; got {got}" in done.stderr


def test_a_change_that_a_stored_recipe_cannot_take_is_refused_by_name(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe())
    done = call("run", "--like", run.run_id, "--set", "training.max_stebs=3")
    assert done.returncode == 2
    assert "did you mean max_steps?" in done.stderr
    assert list_runs() == [run]


def test_what_is_given_in_the_place_of_a_recipe_is_named(call: Cli, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}\n')
    done = call("run", data)
    assert done.stderr.endswith("rows.jsonl is a data file, not a recipe: name it in a recipe as dataset.name\n")
    done = call("run", "max_steps=50")
    said = "there is no file 'max_steps=50'; to change a key of the recipe, write --set max_steps=50"
    assert (done.returncode, done.stderr) == (2, f"error: {said}\n")


def test_nearly_the_name_of_an_installed_model_is_warned_of_before_the_hub_is_asked(
    call: Cli, write_recipe: Write
) -> None:
    recipe = write_recipe()
    done = call("run", recipe, "--set", "model={name: austin-llama}", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"warning: {recipe}: model.name: austin-llama is not on this machine; ")
    assert "did you mean austen-llama" in done.stderr


def test_of_runs_with_one_name_the_newest_is_meant_and_named(call: Cli, write_recipe: Write) -> None:
    recipe = write_recipe(name="twin")
    first, last = write_run(recipe), write_run(recipe, "training.seed=1")
    done = call("show", "twin")
    assert done.stderr == f"note: 2 runs are named twin; this is the newest, {last.run_id}\n"
    assert str(last.path) in "".join(done.stdout.split())
    assert not call("show", first.run_id).stderr
