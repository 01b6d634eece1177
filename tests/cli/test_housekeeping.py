"""``rm`` and ``prune`` delete what nobody needs, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsebp_cli.run import RunFolder, home, list_runs

from .conftest import Cli, Write, write_run


def add_checkpoints(run: RunFolder, *, with_model: bool = True) -> None:
    for step in (2, 3):
        folder = run.path / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / "state.bin").write_bytes(bytes(1000))
    if with_model:
        (run.path / "model").mkdir()
        (run.path / "model" / "weights.bin").write_bytes(bytes(500))


def write_interrupted(recipe: Path) -> RunFolder:
    run = write_run(recipe)
    lines = (run.path / "journal.jsonl").read_text().splitlines(keepends=True)
    (run.path / "journal.jsonl").write_text("".join(line for line in lines if '"end"' not in line))
    add_checkpoints(run, with_model=False)
    return run


def test_prune_deletes_checkpoints_of_finished_runs_alone(call: Cli, write_recipe: Write) -> None:
    run, other = write_run(write_recipe()), write_interrupted(write_recipe(name="other"))
    add_checkpoints(run)
    files = [file for file in run.path.rglob("*") if file.is_file() and "checkpoints" not in file.parts]
    before = {file: file.read_bytes() for file in files}
    assert "2.00 kB would be freed" in call("prune", "--dry-run").stdout
    assert len(list((run.path / "checkpoints").iterdir())) == 2
    done = call("prune")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2.00 kB freed")
    assert f"{run.run_id} fake: 2.00 kB" in done.stdout
    assert list((run.path / "checkpoints").iterdir()) == []
    assert {file: file.read_bytes() for file in before} == before
    assert len(list((other.path / "checkpoints").iterdir())) == 2
    assert call("prune").stdout == "0 B freed\n"


def test_the_newest_checkpoint_of_a_finished_run_without_a_model_stays(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe())
    add_checkpoints(run, with_model=False)
    assert "1.00 kB freed" in call("prune", run.run_id).stdout
    assert [place.name for place in (run.path / "checkpoints").iterdir()] == ["step-00000003"]


def test_prune_refuses_a_run_that_is_named_and_not_finished(call: Cli, write_recipe: Write) -> None:
    run = write_interrupted(write_recipe())
    done = call("prune", run.run_id)
    assert done.returncode == 2
    assert done.stderr == f"error: run {run.run_id} is interrupted: only finished runs need no checkpoints\n"
    assert len(list((run.path / "checkpoints").iterdir())) == 2


def test_rm_deletes_the_runs_that_are_named_and_no_other(call: Cli, write_recipe: Write) -> None:
    run, interrupted = write_run(write_recipe()), write_interrupted(write_recipe(name="other"))
    left = write_run(write_recipe(name="left"))
    done = call("rm", run.run_id, interrupted.run_id, "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 runs deleted, ")
    assert [folder.run_id for folder in list_runs()] == [left.run_id]
    assert not (home() / "deleted").exists()


def test_rm_asks_and_deletes_nothing_where_nobody_answers(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe())
    done = call("rm", run.run_id)
    assert done.returncode == 2
    assert done.stderr == (
        "error: nobody can be asked here: give --yes to delete without a question; nothing was deleted\n"
    )
    assert run.path.is_dir()


@pytest.mark.parametrize("role", ["worker", "target"])
def test_rm_refuses_a_run_that_lives_before_it_deletes_any(call: Cli, write_recipe: Write, role: str) -> None:
    over, alive = write_run(write_recipe()), write_interrupted(write_recipe(name="alive"))
    with alive.lock(role):
        done = call("rm", over.run_id, alive.run_id, "--yes")
    assert done.returncode == 101
    assert "nothing was deleted" in done.stderr
    assert over.path.is_dir()
    assert alive.path.is_dir()


def test_a_deletion_that_was_killed_is_finished_by_the_next(call: Cli, write_recipe: Write) -> None:
    gone, run = write_run(write_recipe()), write_run(write_recipe(name="second"))
    (home() / "deleted").mkdir()
    gone.path.rename(home() / "deleted" / gone.run_id)
    assert [folder.run_id for folder in list_runs()] == [run.run_id]
    call("rm", run.run_id, "--yes")
    assert not (home() / "deleted").exists()


def test_a_damaged_run_is_deleted_like_any_other(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe())
    run.plan_file.write_text("{")
    (run.path / "tracking.json").write_text(json.dumps({"uri": "sqlite:////nowhere", "mlflow_run_id": "a"}))
    assert call("rm", run.run_id, "--yes").returncode == 0
    assert not run.path.exists()


def test_a_store_that_does_not_answer_keeps_its_record_and_says_so(call: Cli, write_recipe: Write) -> None:
    run = write_run(write_recipe(), "tracking.uri=sqlite:////nowhere/at/all.db")
    (run.path / "tracking.json").write_text(json.dumps({"uri": "http://other", "mlflow_run_id": "a"}))
    done = call("rm", run.run_id, "--yes")
    assert done.returncode == 0
    assert "its record in MLflow stays: it is in http://other, and the run's store is now sqlite:" in done.stderr
    assert not run.path.exists()
