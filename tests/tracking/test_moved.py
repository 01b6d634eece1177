"""Stores that are no longer as they were: moved, deleted in, refused. What is advised sends everything after all."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import RunFolder
from sparsebp_cli.tracking import Flusher, Follower, delete_record, sync
from tests.tracking.material import metric_rows
from tests.tracking.server import Server

MakeRun = Callable[..., RunFolder]
COMMAND = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()"]


def move_home(home: Path, new: Path, how: str) -> Path:
    """Move the home; return the new place."""
    if how == "renamed":
        home.rename(new)
    else:  # it was reached by a link, which is gone
        home.unlink()
    return new


def advised(text: str) -> list[str]:
    """The commands that a line names."""
    return re.findall(r"`(.+?)`", text)


def carry_out(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of an advice in a shell, with this interpreter's own commands."""
    words = command.replace("sparsebp ", shlex.join(COMMAND) + " ", 1) if command.startswith("sparsebp ") else command
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        words, shell=True, capture_output=True, text=True, check=False, env=os.environ | {"PATH": path}
    )


@pytest.mark.parametrize("how", ["renamed", "link"])
def test_a_home_that_was_moved_is_sent_to_again_and_shows_its_files(
    fresh_database: Path, home_folder: Path, make_run: MakeRun, tmp_path: Path, monkeypatch, how: str
) -> None:
    place = tmp_path / "new home ü"
    if how == "link":
        place.mkdir()
        home_folder.symlink_to(place)
    else:
        home_folder.mkdir()
    (home_folder / "mlflow.db").write_bytes(fresh_database.read_bytes())
    old, alive = make_run(5), make_run(5, end=None)
    assert sync(old).complete
    assert sync(alive).complete
    new = move_home(home_folder, place, how)
    monkeypatch.setenv("SPARSEBP_HOME", str(new))
    store = f"sqlite:///{new}/mlflow.db"
    late = RunFolder(new / "runs" / make_run(7).run_id)
    done = carry_out("sparsebp sync --all")  # MLflow keeps the places that a process knows
    assert (done.returncode, done.stderr) == (0, "")
    assert not home_folder.exists()
    client = MlflowClient(store)
    for run in (late, old):
        [found] = client.search_runs(["1"], f"tags.`sparsebp.run_id` = '{run.run_id}'")
        assert {file.path for file in client.list_artifacts(found.info.run_id)} >= {"recipe.yaml"}
        assert found.info.status == "FINISHED"
    assert delete_record(RunFolder(new / "runs" / old.run_id)) == ""  # though it was sent to another address
    assert len(client.search_runs(["1"])) == 2


def test_artifacts_that_lie_elsewhere_on_purpose_stay_there(store: Path, make_run: MakeRun, tmp_path: Path) -> None:
    own = tmp_path / "own" / "mlartifacts"
    own.mkdir(parents=True)
    MlflowClient(f"sqlite:///{store}").create_experiment("sparsebp", artifact_location=own.as_uri())
    assert sync(make_run(2)).complete
    assert list(own.rglob("recipe.yaml"))
    assert not (store.parent / "mlartifacts").exists()


def test_a_home_that_moves_while_a_run_is_followed_is_not_made_again(
    store: Path, home_folder: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    run, said = make_run(5, end=None), list[str]()
    follower = Follower(run, every=1000.0, within=30.0, warn=said.append)
    assert follower.flush().complete
    home_folder.rename(tmp_path / "elsewhere")
    result = follower.start().stop()
    assert not home_folder.exists()
    assert "was moved or deleted during the run" in result.problem
    assert len(said) == 1


def test_what_was_deleted_in_the_store_is_brought_back_by_the_command_of_the_warning(
    server: Server, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, first, second = MlflowClient(server.uri), make_run(5), make_run(5)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    client.delete_experiment(client.create_experiment("sparsebp"))
    told = [(first, sync(first).advice(first.run_id))]
    client.restore_experiment("1")
    client.delete_run(sync(second).mlflow_run_id)
    told.append((second, sync(second).advice(second.run_id)))
    client.delete_experiment("1")
    for (run, advice), kind in zip(told, ("experiments", "runs"), strict=True):
        restore, send = advised(advice)
        assert f" mlflow {kind} restore " in restore
        assert send == f"sparsebp sync {run.run_id}"
        with monkeypatch.context() as patch:
            patch.delenv("MLFLOW_TRACKING_URI")  # the command names the store
            assert (done := carry_out(restore)).returncode == 0, done.stderr
        assert (done := carry_out(send)).returncode == 0, done.stderr
    assert len(metric_rows(server.database)) == 20


REFUSED = ["file:./mlruns", "sqlite:///relative.db"]


@pytest.mark.parametrize("uri", REFUSED)
def test_a_run_whose_own_address_is_refused_is_sent_by_the_command_of_the_warning(
    store: Path, make_run: MakeRun, uri: str
) -> None:
    run = make_run(5, tracking={"uri": uri})  # by an earlier version: a recipe is refused now
    assert Plan.load(run.plan_file).recipe.tracking.uri == uri
    advice = Follower(run, every=1000.0).start().stop().advice(run.run_id)
    assert sync(run).advice(run.run_id) == advice
    [words] = advised(advice)
    done = carry_out(words)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(metric_rows(store)) == 10
    plain = carry_out(f"sparsebp sync {run.run_id}")
    assert plain.returncode == 100
    assert f"`{words}`" in plain.stderr


def test_sync_sends_a_run_to_another_store_and_refuses_one_that_is_none(
    store: Path, fresh_database: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    other = tmp_path / "other.db"
    other.write_bytes(fresh_database.read_bytes())
    run = make_run(5, tracking={"uri": "http://127.0.0.1:9"})
    done = carry_out(f"sparsebp sync --all --uri sqlite:///{other}")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(metric_rows(other)) == 10
    assert Flusher(run, f"sqlite:///{other}").flush().points_sent == 0
    done = carry_out(f"sparsebp sync {run.run_id} --uri file:/x")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --uri must be a server (http, https) or a database (sqlite")
