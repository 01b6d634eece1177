"""A folder from another machine, a sqlite store and an MLflow server read alike, and so does what others logged."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from sparsebp_cli.compare import (
    Comparison,
    Question,
    choose,
    compare_runs,
    load_all,
    local_candidates,
    store_candidates,
    table,
)
from sparsebp_cli.compare.archive import list_members, open_archive, write_archive
from sparsebp_cli.compare.store import unflatten
from sparsebp_cli.errors import TrackingError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.tracking import Flusher, sync
from sparsebp_cli.tracking.content import parameters
from sparsebp_cli.tracking.store import open_client
from tests.tracking.server import Server

pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
    pytest.mark.slow,
]
MakeRun = Callable[..., RunFolder]
TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.1, "along": "rows"}], "exact": False}


@pytest.fixture
def store(fresh_database: Path, tmp_path: Path) -> str:
    """The address of an empty sqlite store."""
    (tmp_path / "store").mkdir()
    return f"sqlite:///{shutil.copy(fresh_database, tmp_path / 'store' / 'mlflow.db')}"


@pytest.fixture
def server(tmp_path: Path, fresh_database: Path) -> Iterator[Server]:
    """A server that is running."""
    found = Server(tmp_path / "server", fresh_database)
    try:
        found.start()
        yield found
    finally:
        found.kill()


@pytest.fixture
def study(make_run: MakeRun) -> list[RunFolder]:
    """Three seeds of dense and of topk with layers and examples, one that failed and one that diverged."""
    runs = []
    for seed, loss in enumerate((3.0, 3.1, 2.9)):
        runs.append(make_run("dense", seed, loss=loss))
        runs.append(make_run("topk", seed, loss=loss + 0.1 + seed / 100, seconds=0.1, **TOPK))
    for run in runs:
        with JournalWriter(run.path) as journal:
            journal.write("layers", step=10, values={"a": {"kept_share": 0.5, "cosine": 0.9}})
            journal.write("note", level="warning", text="the kernel is slow")
            journal.write("examples", step=20, values={"loss": [1.0, 2.0, 3.0 + len(run.run_id)], "targets": [9, 9, 9]})
    runs.append(make_run("topk", 3, end="failed", text="out of memory", steps=5, **TOPK))
    runs.append(make_run("topk", 4, metrics={"eval/loss": float("inf")}, **TOPK))
    return runs


def read_back(place: str, *words: str) -> Comparison:
    return compare_runs(load_all(choose(store_candidates(place), words or ("dense", "topk"), None, "there"))[0])


def without_source(comparison: Comparison) -> Comparison:
    """Where runs were read is the only thing that may differ; a store counts in milliseconds and has no infinity."""
    runs = tuple(replace(run, source="", reason=run.reason.replace("inf", "nan")) for run in comparison.runs)
    return replace(comparison, runs=runs)


def test_a_folder_a_database_and_a_server_read_alike(
    study: list[RunFolder], store: str, server: Server, tmp_path: Path
) -> None:
    here = compare_runs(load_all(choose(local_candidates(), ["dense", "topk"], None, "here"))[0])
    for run in study:
        assert sync(run, store).complete
        (run.path / "tracking.json").unlink()
        assert sync(run, server.uri).complete
    copied = tmp_path / "from-another-machine"
    shutil.move(study[0].path.parent, copied)
    there = compare_runs(load_all(choose(local_candidates(copied), ["dense", "topk"], None, "there"))[0])
    assert there == here
    assert without_source(read_back(store)) == without_source(here)
    assert without_source(read_back(server.uri)) == without_source(here)
    assert here.groups[1].layers.figures["kept_share"] == ((0.5,),)
    assert len(here.groups[1].quality.examples) == 3
    server.kill()
    with pytest.raises(TrackingError, match=r"^tracking store http://127\.0\.0\.1"):
        store_candidates(server.uri)


def test_without_its_artifacts_a_database_still_gives_groups_seeds_and_curves(
    study: list[RunFolder], store: str, tmp_path: Path
) -> None:
    here = compare_runs(study)
    for run in study:
        sync(run, store)
    shutil.rmtree(tmp_path / "store" / "mlartifacts")
    found = read_back(store)
    assert [(g.group, g.label, g.seeds, g.states) for g in found.groups] == [
        (g.group, g.label, g.seeds, g.states) for g in here.groups
    ]
    assert [g.quality.difference for g in found.groups] == [g.quality.difference for g in here.groups]
    failed = next(run for run in found.runs if run.state == "failed")
    assert failed.reason == "failed: out of memory"


def test_runs_of_a_store_are_chosen_by_both_ids_names_tags_recipe_and_metrics(
    study: list[RunFolder], store: str
) -> None:
    results = [sync(run, store) for run in study]
    candidates = store_candidates(store)
    assert len(candidates) == 8

    def pick(*words: str, where: str | None = None) -> list[str]:
        return [candidate.run_id for candidate in choose(candidates, words, where, "there")]

    assert pick(study[0].run_id) == pick(results[0].mlflow_run_id) == [study[0].run_id]
    assert len(pick("topk")) == 5
    assert pick(where="keep<0.2 and seed=1") == [study[3].run_id]
    assert pick(where="state=failed") == [study[6].run_id]
    assert pick(where="eval/loss<3.0") == [study[4].run_id]
    assert pick(where=f"tag.sparsebp.group={Plan.load(study[1].plan_file).group} and seed=0") == [study[1].run_id]


def test_a_run_that_was_sent_in_part_is_shown_as_such_and_counts_nowhere(make_run: MakeRun, store: str) -> None:
    whole, partial = make_run(seed=0), make_run(seed=1)
    sync(whole, store)
    lines = partial.path.joinpath("journal.jsonl").read_text().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if '"step": 12' in line)
    partial.path.joinpath("journal.jsonl").write_text("".join([*lines[:cut], lines[-1]]))
    sync(partial, store)
    found = read_back(store, "dense")
    line = next(run for run in found.runs if run.run_id == partial.run_id)
    assert not line.counts
    send = f"`sparsebp sync {partial.run_id}` on the machine of the run sends the rest"
    assert line.reason == f"half sent: the store has 11 of 20 steps; {send}"
    assert found.groups[0].seeds == (0,)
    partial.path.joinpath("journal.jsonl").write_text("".join(lines))
    assert sync(partial, store).complete
    assert read_back(store, "dense").groups[0].seeds == (0, 1)


def test_a_run_that_still_works_is_shown_as_running(make_run: MakeRun, store: str) -> None:
    run = make_run(end=None, steps=5)
    with run.lock("worker"):
        Flusher(run, store).flush()
        found = read_back(store, run.run_id)
    assert [(line.state, line.counts, line.reason) for line in found.runs] == [("running", False, "running")]


def log_foreign(client: MlflowClient, name: str, seed: int | None, loss: float, status: str = "FINISHED") -> str:
    """What somebody's own script logs: no plan, names of their own, no step times."""
    experiment = client.get_experiment_by_name("theirs")
    found = experiment.experiment_id if experiment else client.create_experiment("theirs")
    run = client.create_run(found, run_name=name, start_time=1_700_000_000_000)
    client.log_param(run.info.run_id, "lr", "0.1" if name == "a" else "0.2")
    if seed is not None:
        client.log_param(run.info.run_id, "random_seed", str(seed))
    rows = [Metric("eval_loss", loss + 1.0 / (step + 1), 1_700_000_000_000 + 1000 * step, step) for step in range(5)]
    client.log_batch(run.info.run_id, [*rows, Metric("pass_1", 0.5, 1_700_000_001_000, 9)])
    if status != "RUNNING":
        client.set_terminated(run.info.run_id, status)
    return str(run.info.run_id)


def test_runs_that_somebody_elses_client_logged_are_compared_by_their_parameters(store: str) -> None:
    client = open_client(store)
    for seed, loss in enumerate((3.0, 3.1, 2.95)):
        log_foreign(client, "a", seed, loss)
        log_foreign(client, "b", seed, loss - 0.5 - seed / 100)
    log_foreign(client, "b", 7, 2.0, "FAILED")
    log_foreign(client, "b", 8, 2.0, "RUNNING")
    log_foreign(client, "b", None, 2.4)
    runs, _ = load_all(choose(store_candidates(store), ["a", "b"], None, "there"))
    found = compare_runs(runs, metric="eval_loss")
    assert [(g.label, g.seeds, g.states) for g in found.groups] == [
        ("a", (0, 1, 2), {"finished": 3}),
        ("b", (0, 1, 2), {"finished": 4, "failed": 1, "running": 1}),
    ]
    assert found.better == "lower"
    difference = found.groups[1].quality.difference
    assert difference is not None
    assert (difference.n, round(difference.mean, 3)) == (3, -0.51)
    assert [(c.key, c.baseline, c.value) for c in found.groups[1].changes] == [("lr", "0.1", "0.2")]
    curve = found.runs[0].curves["eval_loss"]
    assert [point.seconds for point in curve] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert any("logged no step times" in line for line in found.warnings)
    assert any("logged no seed" in line for line in found.warnings)
    assert table(found)


def test_ours_and_theirs_stand_in_one_comparison(study: list[RunFolder], store: str) -> None:
    for run in study[:2]:
        sync(run, store)
    theirs = log_foreign(open_client(store), "theirs", 0, 3.0)
    found = read_back(store, "dense", "topk", theirs)
    assert [group.label for group in found.groups] == ["dense", "topk", "theirs"]
    assert found.groups[2].verdict.startswith("no quality to compare")


def test_the_parameters_that_were_sent_become_the_recipe_again(make_run: MakeRun) -> None:
    run = make_run(
        "name",
        3,
        policy=[{"name": "topk", "keep": 0.1, "along": "rows"}, {"name": "random", "keep": 1.0}],
        training={"optim_args": {"betas": [0.9, 0.95]}},
        backward={"exclude": ["*head"]},
    )
    plan = Plan.load(run.plan_file)
    assert unflatten(parameters(plan)) == plan.recipe.model_dump(mode="json")


def test_a_run_that_an_earlier_release_sent_has_the_group_of_this_one(
    make_run: MakeRun, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("old", 3)
    former = {"tracking.also": '["trackio"]', "backward.time_forms": "False"}
    monkeypatch.setattr("sparsebp_cli.tracking.flush.parameters", lambda plan: parameters(plan) | former)
    assert sync(run, store).complete
    shutil.rmtree(tmp_path / "store" / "mlartifacts")
    (found,) = read_back(store, "old").groups
    assert found.group == Plan.load(run.plan_file).group


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="there is no such file"):
        store_candidates(f"sqlite:///{tmp_path}/none.db")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(TrackingError, match=r"^tracking store http") as caught:
        store_candidates(address)
    assert "\n" not in str(caught.value)


def test_a_store_that_is_read_stays_as_it_was_and_nothing_is_left_beside_it(make_run: MakeRun, store: str) -> None:
    run = make_run()
    sync(run, store)
    file = Path(store.removeprefix("sqlite:///"))
    file.with_name(f"{file.name}.lock").unlink(missing_ok=True)
    before = file.read_bytes(), sorted(file.parent.iterdir())
    found = read_back(store, "dense")
    assert [(line.run_id, line.source) for line in found.runs] == [(run.run_id, store)]
    assert (file.read_bytes(), sorted(file.parent.iterdir())) == before


def test_runs_that_a_trial_of_an_earlier_release_added_are_compared_with_one_warning(
    make_run: MakeRun, store: str, tmp_path: Path
) -> None:
    kinds: dict[str, dict[str, Any]] = {"dense": {}, "topk": TOPK}
    runs = [make_run(name, seed, loss=3.0 + seed / 100, **some) for seed in range(3) for name, some in kinds.items()]
    for run in runs:
        assert sync(run, store).complete
    plain = compare_runs(runs, Question(margin=0.02))
    runs[0].trial_file.write_text('{"metric": "eval/loss"}')
    client = open_client(store)
    (there,) = client.search_runs(["1"], filter_string=f"tags.`sparsebp.run_id` = '{runs[0].run_id}'")
    client.set_tag(there.info.run_id, "sparsebp.trial", runs[0].trial_file.read_text())
    stored = load_all(choose(store_candidates(store), ["dense", "topk"], None, "there"))[0]
    write_archive(tmp_path / "runs.tar.gz", [member for run in runs for member in list_members(run)])
    archived = [RunFolder(path) for path in sorted((open_archive(tmp_path / "runs.tar.gz") / "runs").iterdir())]
    for some in (runs, stored, archived):
        found = compare_runs(some, Question(margin=0.02))
        (added,) = set(found.warnings) - set(plain.warnings)
        assert added.startswith("`run --until-ci` of 0.5 added seeds until a margin was decided")
        assert [group.quality.not_worse for group in found.groups] == [g.quality.not_worse for g in plain.groups]
