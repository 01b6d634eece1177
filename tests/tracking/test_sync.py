"""One table in the store, however the journal got there."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run

from sparsebp_cli.errors import TrackingError
from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.provenance import Provenance
from sparsebp_cli.run import History, JournalWriter, RunFolder
from sparsebp_cli.tracking import Flusher, delete_record, sync
from sparsebp_cli.tracking.content import clean_name, find_state
from tests.tracking.material import Row, attempt, metric_rows

MakeRun = Callable[..., RunFolder]


def expected_rows(run: RunFolder) -> list[Row]:
    """The table that the journal means."""
    history = History.load(run.path)
    return sorted(
        (name, step, int(time * 1000), value, 0)
        for name, points in history.metrics.items()
        for step, (time, value) in points.items()
    )


def only_run(store: Path) -> Run:
    client = MlflowClient(f"sqlite:///{store}")
    experiments = [e.experiment_id for e in client.search_experiments()]
    (found,) = client.search_runs(experiments)
    return found


def test_the_store_has_the_status_and_the_data_of_a_run_that_is_over(store: Path, make_run: MakeRun) -> None:
    run = make_run(3, end=None)
    with run.lock("worker"):
        assert sync(run).complete
    with JournalWriter(run.path) as journal:
        journal.write("end", status="finished", step=4, text="")
    assert sync(run).complete
    found = only_run(store)
    assert found.info.status == "FINISHED"
    assert found.data.tags["sparsebp.dataset_digest"] == "abc"


def test_the_store_holds_exactly_the_journals_points(store: Path, make_run: MakeRun) -> None:
    run = make_run(30)
    result = sync(run)
    assert (result.points_sent, result.complete, result.problem) == (60, True, "")
    assert result.uri == f"sqlite:///{store}"
    assert metric_rows(store) == expected_rows(run)
    assert len(metric_rows(store)) == 60
    assert only_run(store).info.run_id == result.mlflow_run_id


def test_sending_twice_changes_nothing(store: Path, make_run: MakeRun) -> None:
    run = make_run(30)
    sync(run)
    before = (metric_rows(store), only_run(store).to_dictionary())
    again = sync(run)
    assert (again.points_sent, again.complete) == (0, True)
    assert (metric_rows(store), only_run(store).to_dictionary()) == before


@pytest.mark.always("half", "lost")
@pytest.mark.parametrize("damage", ["lost", "half", "foreign", "older", "ahead"])
def test_whatever_happens_to_the_kept_place_there_is_one_run_and_one_table(
    store: Path, make_run: MakeRun, damage: str
) -> None:
    run = make_run(1500)
    assert sync(run).points_sent == 3000
    file = run.path / "tracking.json"
    kept = json.loads(file.read_text())
    if damage == "lost":
        file.unlink()
    elif damage == "half":
        file.write_text(file.read_text()[:40])
    elif damage == "foreign":
        file.write_text('["something else"]')
    elif damage == "older":  # killed between sending a batch and keeping the place
        file.write_text(json.dumps(kept | {"offset": kept["offset"] // 3}))
    else:
        file.write_text(json.dumps(kept | {"offset": kept["offset"] + 10_000}))
    assert sync(run).complete
    assert metric_rows(store) == expected_rows(run)
    assert only_run(store).info.run_id == kept["mlflow_run_id"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))])
def test_a_journal_sent_in_pieces_gives_the_table_of_one_that_is_sent_at_once(
    store: Path, fresh_database: Path, make_run: MakeRun, tmp_path: Path, seed: int
) -> None:
    run, draw = make_run(0, end=None), random.Random(seed)
    flusher, done = Flusher(run), 0
    for _ in range(5):
        start = draw.randint(max(0, done - 20), done)  # resumed from a checkpoint: some steps come again
        done = start + draw.randint(1, 60)
        attempt(run, start, done, end=draw.choice(["interrupted", None]), bias=draw.random())
        if draw.random() < 0.3:
            (run.path / "tracking.json").unlink(missing_ok=True)
        if draw.random() < 0.5:
            flusher.flush()
        else:
            assert sync(run).complete
    attempt(run, done, done + 5)
    assert flusher.flush().complete
    other = Path(shutil.copy(fresh_database, tmp_path / "other.db"))
    assert sync(run, f"sqlite:///{other}").complete
    assert metric_rows(store) == metric_rows(other) == expected_rows(run)


def test_a_half_written_last_line_is_left_until_it_is_whole(store: Path, make_run: MakeRun) -> None:
    run = make_run(3, end=None)
    line = b'{"kind":"metrics","attempt":1,"time":1.5,"step":4,"values":{"train/loss":1.0}}\n'
    with (run.path / "journal.jsonl").open("ab") as journal:
        journal.write(line[:30])
    assert sync(run).points_sent == 6
    with (run.path / "journal.jsonl").open("ab") as journal:
        journal.write(line[30:])
    assert sync(run).points_sent == 1
    assert metric_rows(store) == expected_rows(run)


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(store: Path, make_run: MakeRun) -> None:
    run = make_run(10, end="interrupted")
    first = sync(run)
    stopped = only_run(store)
    assert stopped.info.status == "KILLED"
    assert stopped.info.end_time is not None
    with run.lock("worker"):
        attempt(run, 5, 15, end=None, bias=0.5)
        second = sync(run)
        assert second.mlflow_run_id == first.mlflow_run_id
        assert only_run(store).info.status == "RUNNING"
        assert second.points_sent == 10
    attempt(run, 15, 20)
    sync(run)
    done = only_run(store)
    assert done.info.status == "FINISHED"
    assert done.info.end_time > stopped.info.end_time
    assert done.data.tags["sparsebp.attempts"] == "3"
    assert done.data.metrics["train/loss"] == pytest.approx(3.0 / 20)
    assert metric_rows(store) == expected_rows(run)
    environments = json.loads((Path(artifact_folder(done)) / "environment.json").read_text())
    assert [found["attempt"] for found in environments] == [1, 2, 3]


def artifact_folder(run: Run) -> str:
    return str(run.info.artifact_uri).removeprefix("file://")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("finished", "FINISHED"),
        ("failed", "FAILED"),
        ("cancelled", "KILLED"),
        ("interrupted", "KILLED"),
        (None, "KILLED"),
    ],
)
def test_the_final_status_is_the_runs_own(store: Path, make_run: MakeRun, end: str | None, status: str) -> None:
    run = make_run(2, end=end)
    sync(run)
    found = only_run(store)
    assert found.info.status == status
    assert found.data.tags["sparsebp.state"] == (end or "interrupted")
    last = json.loads((run.path / "journal.jsonl").read_text().splitlines()[-1])
    assert found.info.end_time == int(last["time"] * 1000)
    if end:
        assert found.data.tags["sparsebp.text"] == last["text"]


def test_the_watcher_sees_the_end_although_it_still_holds_its_lock(store: Path, make_run: MakeRun) -> None:
    run = make_run(2)
    with run.lock("target"):
        sync(run)
    assert only_run(store).info.status == "FINISHED"


@pytest.mark.parametrize("lock", ["worker", "target", ""])
@pytest.mark.parametrize("end", ["finished", "interrupted", None])
@pytest.mark.parametrize("cancelled", [True, False])
def test_the_state_is_that_of_the_runs_folder(make_run: MakeRun, lock: str, end: str | None, cancelled: bool) -> None:
    run = make_run(2, end=end)
    run.target_file.write_text(json.dumps({"after_attempt": 1}))
    if cancelled:
        run.cancel_file.touch()
    if not lock:
        assert find_state(run, History.load(run.path)) == run.state()
        return
    with run.lock(lock):
        assert find_state(run, History.load(run.path)) == run.state()


def test_a_run_that_was_cancelled_before_its_turn_is_killed(store: Path, make_run: MakeRun) -> None:
    run = make_run(2)
    (run.path / "journal.jsonl").unlink()
    run.cancel_file.touch()
    sync(run)
    assert only_run(store).info.status == "KILLED"


def test_a_run_that_waits_is_scheduled(store: Path, make_run: MakeRun) -> None:
    run = make_run(2)
    (run.path / "journal.jsonl").unlink()
    assert sync(run).complete
    assert only_run(store).info.status == "SCHEDULED"
    attempt(run, 0, 2)
    sync(run)
    assert only_run(store).info.status == "FINISHED"


def test_values_that_are_not_finite_are_never_turned_into_numbers(store: Path, make_run: MakeRun) -> None:
    run = make_run(1, end=None)
    with JournalWriter(run.path) as journal:
        journal.write("metrics", step=2, values={"a": math.inf, "b": -math.inf, "c": math.nan, "d": 1.0})
    for _ in range(2):
        assert sync(run).complete
        (run.path / "tracking.json").unlink()
    rows = {row[0]: (row[3], row[4]) for row in metric_rows(store) if row[1] == 2}
    assert rows == {"a": (0.0, 1), "b": (0.0, 1), "c": (0.0, 1), "d": (1.0, 0)}
    assert only_run(store).data.tags["sparsebp.not_finite"] == "a,b"


def test_names_that_mlflow_refuses_are_changed_and_one_record_may_hold_thousands(
    store: Path, make_run: MakeRun
) -> None:
    run = make_run(0, end=None)
    names = {f"layer/{index}": float(index) for index in range(2500)}
    with JournalWriter(run.path) as journal:
        journal.write("metrics", step=1, values=names | {"pass@1": 0.5, "../up//x/": 0.25, "ok name-1.2:x": 0.75})
    assert sync(run).points_sent == 2503
    rows = {row[0]: row[3] for row in metric_rows(store)}
    assert len(rows) == 2503
    assert (rows["pass_1"], rows["up/x"], rows["ok name-1.2:x"]) == (0.5, 0.25, 0.75)
    assert clean_name("@" * 300) == "_" * 250
    assert clean_name("//") == "_"


def test_the_resolved_recipe_becomes_parameters_tags_and_artifacts(store: Path, make_run: MakeRun) -> None:
    run = make_run(
        2,
        policy=[{"name": "topk", "keep": 0.1, "along": "rows"}, {"name": "random"}],
        training={"optim_args": {"betas": [0.9, 0.95], "weight_decay": 0.01}},
        tracking={"tags": {"figure": "one"}},
        provenance=Provenance(git_sha="a" * 40, git_diff="+ changed\n", sparsebp_version="1.2", recipe_file="r.yaml"),
    )
    sync(run)
    found, plan = only_run(store), Plan.load(run.plan_file)
    wanted = {
        "policy.0.name": "topk",
        "policy.0.keep": "0.1",
        "training.optim_args.betas": "[0.9, 0.95]",
        "training.learning_rate": "0.0003",
        "model.lora": "null",
        "backward.exclude": "[]",
    }
    assert wanted.items() <= found.data.params.items()
    tags = {
        "sparsebp.run_id": run.run_id,
        "sparsebp.group": plan.group,
        "sparsebp.policies": "topk,random",
        "sparsebp.dataset_digest": "abc",
        "mlflow.source.git.commit": "a" * 40,
        "mlflow.source.name": "r.yaml",
        "mlflow.runName": "demo seed 0",
        "sparsebp.group_name": f"demo {plan.group[:4]}",
        "figure": "one",
    }
    assert tags.items() <= found.data.tags.items()
    folder = Path(artifact_folder(found))
    assert folder.is_relative_to(store.parent)
    assert sorted(file.name for file in folder.iterdir()) == [
        "environment.json",
        "git.diff",
        "recipe.yaml",
    ]
    assert "**demo**, seed 0: topk, random; finished." in found.data.tags["mlflow.note.content"]
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["policy"][0] == {
        "name": "topk",
        "keep": 0.1,
        "along": "rows",
    }
    assert (folder / "git.diff").read_text() == "+ changed\n"


def test_a_run_in_the_store_has_its_data_and_the_view_its_columns(store: Path, make_run: MakeRun) -> None:
    run = make_run(3)
    census = {"splits": {"train": {"rows": 9, "examples": 7, "dropped": {"x": 2}}}, "shared": {}}
    with JournalWriter(run.path) as journal:
        journal.write("facts", values={"dataset_digest": "abc", "census": census})
    sync(run)
    sync(run)  # the input stays one
    found = only_run(store)
    [data] = found.inputs.dataset_inputs
    assert json.loads(data.dataset.profile)["splits"] == census["splits"]
    assert (data.dataset.name, data.dataset.digest, data.tags[0].value) == ("d", "abc", "training")
    client = MlflowClient(f"sqlite:///{store}")
    experiment = client.get_experiment(found.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_an_experiment_that_has_a_kind_keeps_it(store: Path, make_run: MakeRun) -> None:
    client = MlflowClient(f"sqlite:///{store}")
    client.create_experiment("sparsebp", tags={"mlflow.experimentKind": "finetuning"})
    sync(make_run(2))
    tags = client.get_experiment(only_run(store).info.experiment_id).tags
    assert tags["mlflow.experimentKind"] == "finetuning"


def test_a_very_long_value_is_cut_to_what_mlflow_takes(store: Path, make_run: MakeRun) -> None:
    run = make_run(1, model={"config": {"model_type": "llama", "odd key@": "x" * 9000}, "tokenizer": "t"})
    assert sync(run).complete
    assert only_run(store).data.params["model.config.odd key_"] == "x" * 6000


def test_links_in_the_runs_folder_are_never_followed_into_the_store(
    store: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    run, secret = make_run(2), tmp_path / "secret.txt"
    secret.write_text("CANARY")
    (run.path / "link.txt").symlink_to(secret)
    (run.path / "checkpoints").symlink_to(tmp_path)
    sync(run)
    files = [file for file in (store.parent / "mlartifacts").rglob("*") if file.is_file()]
    assert len(files) == 2
    assert not any(b"CANARY" in file.read_bytes() for file in files)


def test_a_store_that_was_emptied_gets_everything_again(store: Path, fresh_database: Path, make_run: MakeRun) -> None:
    run = make_run(20)
    flusher = Flusher(run)
    assert flusher.flush().points_sent == 40
    first = only_run(store).info.run_id
    MlflowClient(f"sqlite:///{store}")._tracking_client.store.engine.dispose()
    shutil.copy(fresh_database, store)
    assert flusher.flush().points_sent == 40
    assert only_run(store).info.run_id != first
    assert metric_rows(store) == expected_rows(run)


class BreakingFlusher(Flusher):
    """Loses its store after some batches."""

    batches_left = 0

    def _send_batch(self, client: MlflowClient) -> None:
        if self.batches_left == 0:
            raise OSError("the store is gone")
        self.batches_left -= 1
        super()._send_batch(client)


@pytest.mark.always("1")
@pytest.mark.parametrize("batches", [0, 1, 2])
def test_a_store_lost_between_two_batches_of_one_record_gets_the_rest_later(
    store: Path, make_run: MakeRun, batches: int
) -> None:
    run = make_run(3, end=None)
    with JournalWriter(run.path) as journal:
        journal.write("metrics", step=4, values={f"layer/{index}": float(index) for index in range(2500)})
    breaking = BreakingFlusher(run)
    breaking.batches_left = batches
    with pytest.raises(TrackingError, match="the store is gone"):
        breaking.flush()
    assert len(metric_rows(store)) == breaking.points_sent == 1000 * batches
    assert sync(run).complete
    assert metric_rows(store) == expected_rows(run)
    breaking.batches_left = 99
    assert breaking.flush().points_sent == 0  # another process did it


def test_what_was_sent_to_a_store_that_is_no_more_is_not_taken_as_sent(
    store: Path, fresh_database: Path, make_run: MakeRun
) -> None:
    run = make_run(20)
    flusher = Flusher(run)
    assert flusher.flush().points_sent == 40
    MlflowClient(f"sqlite:///{store}")._tracking_client.store.engine.dispose()
    shutil.copy(fresh_database, store)
    with pytest.raises(TrackingError):
        BreakingFlusher(run).flush()  # it makes the new run, and no more
    assert metric_rows(store) == []
    assert flusher.flush().complete
    assert metric_rows(store) == expected_rows(run)


def test_a_run_that_was_deleted_in_the_store_is_a_problem_and_not_a_second_run(store: Path, make_run: MakeRun) -> None:
    run = make_run(2)
    deleted = sync(run).mlflow_run_id
    client = MlflowClient(f"sqlite:///{store}")
    client.delete_run(deleted)
    (run.path / "tracking.json").unlink()
    result = sync(run)
    assert not result.complete
    assert f"run {deleted} was deleted in MLflow" in result.problem
    client.restore_run(deleted)
    assert sync(run).complete


def test_a_second_store_starts_from_nothing(
    store: Path, fresh_database: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    run, other = make_run(5), Path(shutil.copy(fresh_database, tmp_path / "other.db"))
    sync(run)
    assert sync(run, f"sqlite:///{other}").points_sent == 10
    assert metric_rows(other) == metric_rows(store)


@pytest.mark.parametrize("kind", ["folder", "not a database", "bad address", "no plan"])
def test_a_store_that_cannot_be_used_is_a_problem_of_one_line(home_folder: Path, make_run: MakeRun, kind: str) -> None:
    run, uri = make_run(2), f"sqlite:///{home_folder}/mlflow.db"
    if kind == "folder":
        (home_folder / "mlflow.db").mkdir()
    elif kind == "not a database":
        (home_folder / "mlflow.db").write_text("this is no database\n" * 100)
    elif kind == "bad address":
        uri = "ftp://me:CANARY@host/x"
    else:
        run.plan_file.write_text("{}")
    journal = (run.path / "journal.jsonl").read_bytes()
    result = sync(run, uri)
    assert (result.points_sent, result.complete) == (0, False)
    assert result.problem
    assert "\n" not in result.problem
    assert "CANARY" not in repr(result)
    assert (run.path / "journal.jsonl").read_bytes() == journal


def test_two_runs_of_one_experiment_do_not_meet(store: Path, make_run: MakeRun) -> None:
    first, second = make_run(3), make_run(4)
    assert sync(first).mlflow_run_id != sync(second).mlflow_run_id
    assert sync(first).points_sent == sync(second).points_sent == 0
    assert len(metric_rows(store)) == 14


def test_looking_at_the_room_imports_neither_mlflow_nor_torch() -> None:
    code = "import sys, sparsebp_cli.tracking; print(sorted({'mlflow', 'torch', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


SYNC = """
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from sparsebp_cli.run import RunFolder
from sparsebp_cli.tracking import sync
sys.stdin.read(1)
result = sync(RunFolder(Path(sys.argv[1])))
print(result.points_sent, result.complete, result.problem)
"""


@pytest.mark.long
@pytest.mark.promise("R6")
def test_eight_processes_at_once_on_a_store_that_does_not_exist_yet_lose_nothing(
    make_run: MakeRun, home_folder: Path
) -> None:
    runs = [make_run(500) for _ in range(8)]
    command = [sys.executable, "-W", "ignore", "-c", SYNC]
    processes = [
        subprocess.Popen([*command, str(run.path)], stdin=-1, stdout=-1, stderr=-1, text=True, env=os.environ.copy())
        for run in runs
    ]
    for process in processes:  # all of them are started before the first may begin
        assert process.stdin is not None
        process.stdin.write("!")
        process.stdin.flush()
    said = [process.communicate(timeout=300) for process in processes]
    assert [out for out, _ in said] == ["1000 True \n"] * 8
    assert [err for _, err in said] == [""] * 8
    rows = metric_rows(home_folder / "mlflow.db")
    assert len(rows) == 8000
    assert rows == sorted(row for run in runs for row in expected_rows(run))


@pytest.mark.slow
def test_a_process_killed_while_it_makes_the_store_leaves_nothing_broken(make_run: MakeRun, home_folder: Path) -> None:
    run, part = make_run(5), home_folder / "mlflow.db.part"
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", SYNC, str(run.path)], stdin=-1) as process:
        assert process.stdin is not None
        process.stdin.write(b"!")
        process.stdin.flush()
        while not (part.exists() and part.stat().st_size):
            assert process.poll() is None
        process.kill()
    assert not (home_folder / "mlflow.db").exists()
    assert sync(run).complete
    assert not part.exists()
    assert metric_rows(home_folder / "mlflow.db") == expected_rows(run)


def test_two_processes_that_send_the_same_run_make_one_table(store: Path, make_run: MakeRun) -> None:
    run = make_run(1200)
    command = [sys.executable, "-W", "ignore", "-c", SYNC, str(run.path)]
    processes = [subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    said = [process.communicate("!", timeout=300) for process in processes]
    assert sorted(out for out, _ in said) == ["0 True \n", "2400 True \n"]
    assert metric_rows(store) == expected_rows(run)
    assert only_run(store).data.tags["sparsebp.run_id"] == run.run_id


def test_a_deleted_run_is_deleted_in_the_store_too(store: Path, make_run: MakeRun) -> None:
    run, other = make_run(3), make_run(3)
    assert delete_record(run) == ""  # never sent
    sync(run)
    kept = sync(other)
    assert delete_record(run) == ""
    assert only_run(store).info.run_id == kept.mlflow_run_id
