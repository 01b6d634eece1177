"""The whole way, with the worker that trains: command line, target, worker, journal, MLflow, comparison."""

from __future__ import annotations

import json
import signal
import sqlite3
from pathlib import Path

import pytest

from sparsebp_cli.run import History, State, list_runs

from ..worker.conftest import tiny_folder
from .conftest import REAL, Cli, Start
from .test_handle import wait_for_step

__all__ = ["tiny_folder"]  # a fixture of the worker's tests

RECIPE = """\
version: 1
name: tiny-topk
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}}
  tokenizer: {folder}/tokenizer
dataset: {{name: {folder}/text.txt, max_seq_length: 32}}
policy: [{{name: topk, keep: 0.1, along: rows}}]
training: {{max_steps: 8, per_device_train_batch_size: 2}}
measure: {{eval_every: 4, eval_examples: 8, probe_every: 4, warmup_steps: 1}}
target: {{threads: 1, device: cpu}}
"""


@pytest.fixture
def recipe(tmp_path: Path, tiny_folder: Path) -> Path:
    file = tmp_path / "tiny-topk.yaml"
    file.write_text(RECIPE.format(folder=tiny_folder))
    return file


@pytest.mark.slow
def test_a_sparse_and_a_dense_run_are_trained_tracked_and_compared(
    cli: Cli, recipe: Path, home_folder: Path, tmp_path: Path
) -> None:
    dense = tmp_path / "dense.yaml"
    dense.write_text("version: 1\nname: tiny-dense\nbase: tiny-topk.yaml\npolicy: dense\n")
    done = cli("run", recipe, dense, real=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in (
        "eval loss  first 5.",
        "step 8/8",
        "kept 10",
        "limit ",
        "x as fast as dense (estimated from FLOPs of all steps, and time per FLOP in ",
        "next: sparsebp compare",
    ):
        assert words in done.stdout
    sparse, whole = list_runs()[::-1]
    assert History.load(sparse.path).last("flops/backward_executed") < History.load(whole.path).last(  # type: ignore[operator]
        "flops/backward_executed"
    )
    with sqlite3.connect(home_folder / "mlflow.db") as store:
        points = store.execute("select count(*) from metrics where key = 'train/loss'").fetchone()[0]
        states = store.execute("select status from runs").fetchall()
    store.close()
    assert (points, states) == (16, [("FINISHED",), ("FINISHED",)])
    compared = json.loads(cli("compare", "@2", "-o", "json", real=True).stdout)
    assert [group["label"] for group in compared["groups"]] == ["tiny-dense", "tiny-topk"]
    assert next(change["key"] for change in compared["groups"][1]["changes"]).startswith("policy.0")


@pytest.mark.slow
def test_ctrl_c_then_resume_finishes_the_same_run(start: Start, cli: Cli, recipe: Path) -> None:
    client = start(
        "run",
        recipe,
        "--set",
        "training.max_steps=150",
        "--set",
        "tracking.uri=sqlite:////dev/null/m.db",
        command=REAL,
    )
    run = wait_for_step(3)
    client.send_signal(signal.SIGINT)
    _, errors = client.communicate(timeout=120)
    assert client.returncode == 130, errors
    assert run.state() is State.INTERRUPTED
    done = cli("resume", "@last", real=True)
    assert done.returncode == 0, done.stderr
    history = History.load(run.path)
    assert run.state() is State.FINISHED
    assert list(history.series("train/loss")) == list(range(1, 151))
    assert history.warm[1][1] == history.ends[0]["step"] > 0


@pytest.mark.slow
def test_data_that_is_not_there_is_one_line_and_exit_code_2(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    done = cli(
        "run",
        recipe,
        "--set",
        "dataset.name=lost.txt",
        "--set",
        "tracking.uri=sqlite:////dev/null/m.db",
        real=True,
    )
    assert done.returncode == 2
    assert "lost.txt" in done.stderr
    assert "Traceback" not in done.stderr
