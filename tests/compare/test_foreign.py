"""Runs that other programs logged: what is shown is what MLflow's own list shows, and no treatment becomes a seed."""

from __future__ import annotations

import math
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from sparsebp_cli.compare import (
    Comparison,
    Grouping,
    Question,
    RunCandidate,
    choose,
    compare_runs,
    describe_left_out,
    load_all,
    store_candidates,
)
from sparsebp_cli.compare.question import Reducer, better
from sparsebp_cli.errors import TrackingError, UsageError
from sparsebp_cli.tracking.store import open_client
from tests.compare.database import ForeignStore

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning")


@pytest.fixture
def store(fresh_database: Path, tmp_path: Path) -> ForeignStore:
    """An empty store."""
    return ForeignStore(Path(shutil.copy(fresh_database, tmp_path / "mlflow.db")))


def compare(store: ForeignStore, question: Question | None = None, **more: object) -> Comparison:
    """All of a store's runs, the oldest first."""
    runs, _ = load_all(choose(store_candidates(store.uri), [], None, "there"))
    return compare_runs(runs, question or Question(metric="eval_loss", **more))  # type: ignore[arg-type]


def curve(*values: float) -> list[tuple[int, int, float]]:
    """A value a step."""
    return [(step, 1000 * step, value) for step, value in enumerate(values)]


def test_values_logged_without_a_step_end_at_the_latest_one(store: ForeignStore) -> None:
    for seed in range(3):
        noise = 0.001 * seed * seed
        store.add(
            "base", {"lr": 1, "seed": seed}, {"eval_loss": [(0, t, v + noise) for t, v in enumerate((6, 4, 3.0))]}
        )
        store.add("new", {"lr": 2, "seed": seed}, {"eval_loss": [(0, t, v) for t, v in enumerate((5, 4, 3.5))]})
    found = compare(store)
    assert [group.quality.final.mean for group in found.groups if group.quality.final] == pytest.approx(
        [3.00167, 3.5], abs=1e-4
    )
    assert "is worse by 0.498" in found.groups[1].verdict


def test_a_value_logged_again_at_the_last_step_replaces_the_first(store: ForeignStore) -> None:
    for seed in range(3):
        store.add("base", {"lr": 1, "seed": seed}, {"eval_loss": [*curve(6, 4, 3.0), (2, 9000, 3.0 + 0.001 * seed)]})
        store.add("new", {"lr": 2, "seed": seed}, {"eval_loss": [*curve(6, 4, 3.4), (2, 9000, 2.9)]})
    difference = compare(store).groups[1].quality.difference
    assert difference is not None
    assert difference.mean == pytest.approx(-0.101)


def test_our_last_value_is_the_one_that_mlflow_lists(store: ForeignStore) -> None:
    client = open_client(store.uri)
    run = client.create_run("0", run_name="theirs")
    for value, stamp, step in ((6.0, 5, 0), (4.0, 5, 0), (5.0, 4, 0), (1.0, 9, 3), (float("nan"), 9, 3), (2.0, 8, 3)):
        client.log_metric(run.info.run_id, "eval_loss", value, timestamp=1_700_000_000_000 + stamp, step=step)
    client.log_metric(run.info.run_id, "f1", 0.5)
    time.sleep(0.002)
    client.log_metric(run.info.run_id, "f1", 0.4)
    client.set_terminated(run.info.run_id)
    listed = dict(client.get_run(run.info.run_id).data.metrics)
    loaded = store_candidates(store.uri)[0].loaded
    assert (
        {name: loaded.history.last(name) for name in loaded.history.metrics} == listed == {"eval_loss": 1.0, "f1": 0.4}
    )


def test_an_infinite_loss_is_no_large_number(store: ForeignStore) -> None:
    for seed in range(3):
        store.add("base", {"lr": 1, "seed": seed}, {"eval_loss": curve(6, 3.0)})
        store.add("new", {"lr": 2, "seed": seed}, {"eval_loss": [*curve(6, 3.0), (9, 9000, float("inf"))]})
    runs = [one for one in store_candidates(store.uri) if one.loaded.name == "new"]
    assert [one.loaded.history.last("eval_loss") for one in runs] == [math.inf] * 3
    difference = compare(store).groups[1].quality.difference
    assert difference is None or not math.isfinite(difference.mean)


def test_a_parameter_that_ends_in_state_is_a_treatment(store: ForeignStore) -> None:
    for state, loss in (("fp32", 3.0), ("8bit", 3.3)):
        for seed in range(4):
            params = {"optimizer.state": state, "lr": 0.1, "seed": seed}
            store.add(state, params, {"eval_loss": curve(6, loss + 0.01 * seed)})
    found = compare(store)
    assert [(group.label, group.seeds) for group in found.groups] == [("fp32", (0, 1, 2, 3)), ("8bit", (0, 1, 2, 3))]
    assert [change.key for change in found.groups[1].changes] == ["optimizer.state"]
    assert not any("repeats it" in line for line in found.warnings)


def test_a_constant_data_seed_does_not_collapse_the_seeds(store: ForeignStore) -> None:
    for lr in (0.1, 0.2):
        for seed in range(4):
            params = {"data_seed": 42, "data.seed": 7, "lr": lr, "seed": seed}
            store.add(f"lr {lr}", params, {"eval_loss": curve(6, 3 + lr + 0.01 * seed)})
    found = compare(store)
    assert [group.seeds for group in found.groups] == [(0, 1, 2, 3), (0, 1, 2, 3)]
    assert all(run.counts for run in found.runs)


def test_another_parameter_is_the_seed_only_when_it_is_named(store: ForeignStore) -> None:
    for lr in (0.1, 0.2):
        for seed in range(3):
            params = {"trainer.seed": seed, "lr": lr}
            store.add(f"lr {lr}", params, {"eval_loss": curve(6, 3 + lr + 0.01 * seed * lr)})
    unnamed = compare(store)
    assert len(unnamed.groups) == 6
    assert any(
        "logged no seed" in line and "--seed-param" in line and "trainer.seed" in line for line in unnamed.warnings
    )
    named = compare(store, grouping=Grouping(seed="trainer.seed"))
    assert [group.seeds for group in named.groups] == [(0, 1, 2), (0, 1, 2)]
    with pytest.raises(UsageError, match=r"--seed-param: no run has the key 'traner\.seed'.*trainer\.seed"):
        compare(store, grouping=Grouping(seed="traner.seed"))


def test_where_a_run_writes_and_what_it_is_called_make_no_group(store: ForeignStore) -> None:
    for lr in (0.1, 0.2):
        for seed in range(3):
            own = {"output_dir": f"out/{lr}-{seed}", "run_name": f"r{lr}{seed}", "logging_dir": f"log/{lr}-{seed}"}
            store.add(f"lr {lr}", own | {"seed": seed, "lr": lr}, {"eval_loss": curve(6, 3 + lr + 0.01 * seed * lr)})
    found = compare(store)
    assert [group.seeds for group in found.groups] == [(0, 1, 2), (0, 1, 2)]
    assert [change.key for change in found.groups[1].changes] == ["lr"]


def test_ignore_leaves_keys_out_of_what_decides_and_says_what_it_passes_over(store: ForeignStore) -> None:
    for lr in (0.1, 0.2):
        for seed in range(3):
            params = {"host": f"node{seed}", "port": 1000 + seed, "lr": lr, "seed": seed}
            store.add(f"lr {lr}", params, {"eval_loss": curve(6, 3 + lr + 0.01 * seed * lr)})
    assert len(compare(store).groups) == 6
    for grouping in (Grouping(ignore=("host", "port")), Grouping.parse("host, port", None)):
        found = compare(store, grouping=grouping)
        assert [group.seeds for group in found.groups] == [(0, 1, 2), (0, 1, 2)]
        assert sum("its runs differ in host, port" in line for line in found.warnings) == 2
        assert "host" not in {change.key for change in found.groups[1].changes}
    with pytest.raises(UsageError, match=r"--ignore: no run has the key 'hots'"):
        compare(store, grouping=Grouping(ignore=("hots",)))


@pytest.mark.parametrize(
    ("metric", "way"),
    [
        ("val_acc", "higher"),
        ("acc", "higher"),
        ("auc", "higher"),
        ("test/wer", "lower"),
        ("valWER", "lower"),
        ("ppl", "lower"),
        ("mse", "lower"),
        ("nll", "lower"),
        ("val-f1", "higher"),
        ("em", ""),
        ("neg_mse", ""),
        ("time_to_acc", ""),
        ("loss_scale", ""),
        ("std_loss", ""),
        ("aux_loss", ""),
        ("reward", ""),
        ("", ""),
    ],
)
def test_the_name_of_a_metric_tells_its_direction_only_where_it_is_plain(metric: str, way: str) -> None:
    assert better(metric) == way


def test_a_question_that_needs_a_direction_is_refused_without_one(store: ForeignStore) -> None:
    for name, score in (("a", 0.5), ("b", 0.6)):
        for seed in range(3):
            store.add(name, {"arm": name, "seed": seed}, {"em": curve(0.1, score + 0.01 * seed * score)})
    for question in (
        Question(metric="em", margin=0.01),
        Question(metric="em", target=0.5),
        Question(metric="em", reducer=Reducer("best")),
    ):
        with pytest.raises(UsageError, match=r"cannot tell from 'em' .* add --better lower or higher"):
            compare(store, question)
    assert "differs by" in compare(store, Question(metric="em")).groups[1].verdict
    found = compare(store, Question(metric="em", margin=0.01, better="higher"))
    assert "is better by 0.101" in found.groups[1].verdict
    assert found.groups[1].quality.not_worse is not None
    assert found.groups[1].quality.not_worse.answer == "yes"


def test_a_direction_that_contradicts_a_metric_of_ours_is_refused(store: ForeignStore) -> None:
    store.add("a", {"seed": 0}, {"eval/loss": curve(6, 3)})
    with pytest.raises(UsageError, match="--better: eval/loss is better when lower, got 'higher'"):
        compare(store, Question(metric="eval/loss", better="higher"))


@pytest.mark.slow
def test_a_store_of_an_earlier_mlflow_is_read_and_stays_as_it_was(tmp_path: Path) -> None:
    import sqlalchemy
    from alembic import command
    from mlflow.store.db.utils import _get_alembic_config
    from mlflow.store.tracking.dbmodels.initial_models import Base

    store = ForeignStore(tmp_path / "mlflow.db")
    engine = sqlalchemy.create_engine(store.uri)
    Base.metadata.create_all(engine)
    engine.dispose()
    command.upgrade(_get_alembic_config(store.uri), "cc1f77228345")  # MLflow 2.0
    with closing(sqlite3.connect(store.file)) as tables, tables:
        tables.execute("INSERT INTO experiments (experiment_id, name, lifecycle_stage) VALUES (0, 'e', 'active')")
    for seed in range(3):
        store.add("base", {"lr": 1, "seed": seed}, {"eval_loss": curve(6, 3.0 + seed / 100)})
        store.add("new", {"lr": 2, "seed": seed}, {"eval_loss": curve(6, 3.5 + seed / 100)})
    before = store.file.read_bytes()
    found = compare(store)
    assert [group.quality.final.mean for group in found.groups if group.quality.final] == pytest.approx([3.01, 3.51])
    assert store.file.read_bytes() == before
    assert [*tmp_path.iterdir()] == [store.file]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("newer", "a newer MLflow than .* wrote it: start `mlflow server` with the newer one, and give its address"),
        ("text", "file is not a database"),
        ("locked", "database is locked"),
    ],
)
def test_a_file_that_mlflow_cannot_read_is_one_line_and_stays_as_it_was(
    store: ForeignStore, kind: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsebp_cli.compare.stored.BUSY_SECONDS", 0.1)
    with closing(sqlite3.connect(store.file, isolation_level=None)) as tables:
        if kind == "newer":
            tables.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        if kind == "locked":
            tables.execute("BEGIN EXCLUSIVE")
        if kind == "text":
            store.file.write_text("not a database at all\n" * 100)
        before = store.file.read_bytes()
        with pytest.raises(TrackingError, match=f"^tracking store {store.uri}: {says}") as caught:
            store_candidates(store.uri)
        assert "\n" not in str(caught.value)
        assert store.file.read_bytes() == before


@pytest.mark.slow
def test_a_database_of_another_program_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    with closing(sqlite3.connect(file)) as tables, tables:
        tables.execute("CREATE TABLE trials (number)")
    before = file.read_bytes()
    assert store_candidates(f"sqlite:///{file}") == []
    assert file.read_bytes() == before


@pytest.mark.parametrize("key", ["eval_dataset", "train_split", "corpus.name", "dataPath"])
def test_a_parameter_that_speaks_of_data_reaches_the_verdict(store: ForeignStore, key: str) -> None:
    for name, data in (("a", "wiki"), ("b", "wiki-easy")):
        for seed in range(3):
            value = 3.0 + 0.01 * seed * seed - 0.5 * (name == "b") + 0.001 * seed * (name == "b")
            store.add(name, {key: data, "seed": seed, "dataloader_workers": name}, {"eval_loss": curve(6, value)})
    verdict = compare(store).groups[1].verdict
    assert f"{key} differs (wiki-easy against wiki): the data may differ from the baseline's" in verdict
    assert "dataloader_workers" not in verdict


@pytest.mark.parametrize(("metric", "asked"), [("eval_accuracy", True), ("eval_loss", False)])
def test_a_share_beside_a_percentage_is_asked_about_not_subtracted(
    store: ForeignStore, metric: str, asked: bool
) -> None:
    for name, scale in (("a", 1.0), ("b", 100.0)):
        for seed in range(3):
            store.add(name, {"arm": name, "seed": seed}, {metric: curve(0.1, scale * (0.8 + 0.01 * seed))})
    group = compare(store, Question(metric=metric)).groups[1]
    assert (group.quality.difference is None) is asked
    question = "eval_accuracy is 81 here and 0.81 in the baseline: is one of them in percent?: no statement"
    assert (question in group.verdict) is asked


def test_seeds_of_another_experiment_were_not_left_out() -> None:
    def candidate(place: str, seed: int) -> RunCandidate:
        recipe: dict[str, object] = {"lr": 1, "seed": seed, "tracking.experiment": place}
        return RunCandidate(f"{place}-{seed}", "a", 0.0, recipe, {}, pytest.fail)

    mine, theirs = ([candidate(place, seed + start) for seed in range(3)] for place, start in (("mine", 0), ("b", 5)))
    assert describe_left_out([*mine, *theirs], mine) == []
    (line,) = describe_left_out([*mine, *theirs], mine[:2])
    assert line.endswith("the numbers here leave out seeds 2")
