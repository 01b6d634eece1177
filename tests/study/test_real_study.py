"""A study with the worker that trains: rehearsed, tuned, at equal cost, with controls, compared."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, State, home, list_runs

from ..worker.conftest import tiny_folder

__all__ = ["tiny_folder"]  # a fixture of the worker's tests

REAL = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()"]
BASE = """\
version: 1
name: base
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}}
  tokenizer: {folder}/tokenizer
dataset: {{name: {folder}/text.txt, max_seq_length: 32, test_fraction: 0.5}}
training: {{max_steps: 12, per_device_train_batch_size: 4, warmup_steps: 2}}
measure: {{eval_every: 12, eval_examples: 4, probe_every: 4, fidelity_every: null, warmup_steps: 1}}
checkpoint: {{every: 6}}
target: {{threads: 1, device: cpu}}
tracking: {{uri: "sqlite:////dev/null/mlflow.db"}}  # told before mlflow is imported, which takes seconds
"""
STUDY = """\
version: 1
study: real
base: base.yaml
arms:
  dense: {}
  topk: {policy: [{name: topk, keep: 0.25}]}
"""
SMALL = STUDY + "seeds: {report: [1]}\n"
WHOLE = (
    STUDY
    + """\
vary: {training.learning_rate: [1e-3, 1e-2]}
budget: {same: cost, as: dense, steps: 24}
controls: auto
seeds: {tune: [0], report: 1-2}
"""
)


@pytest.mark.slow
def test_a_small_study_is_trained_and_taken_from_the_store(tmp_path: Path, tiny_folder: Path) -> None:
    assert _study(tmp_path, tiny_folder, SMALL).endswith("next: sparsebp compare --study real\n")
    assert [run.state() for run in list_runs()] == [State.FINISHED] * 2
    assert "2/2  done before" in _study(tmp_path, tiny_folder, SMALL)
    labels = [group["label"] for group in _compare(tmp_path)["groups"]]
    assert labels == ["dense", "topk"]


@pytest.mark.long
def test_a_study_at_equal_cost_is_tuned_controlled_and_compared(tmp_path: Path, tiny_folder: Path) -> None:
    _study(tmp_path, tiny_folder, WHOLE)
    before = {run.run_id for run in list_runs()}
    steps = {(r.name, r.training.max_steps) for run in list_runs() if (r := Plan.load(run.plan_file).recipe)}
    assert ("dense", 24) in steps  # what the other arm's steps cost
    comparison = _compare(tmp_path)
    assert {group["label"] for group in comparison["groups"]} >= {"dense", "topk"}
    wanted = {"random", "fewer_steps", "smaller_batch"}
    assert not [c for c in comparison["controls"] if c["label"] == "topk" and c["kind"] in wanted and c["command"]]
    _study(tmp_path, tiny_folder, WHOLE)
    assert {run.run_id for run in list_runs()} == before
    _check_choices(tmp_path)


def _check_choices(folder: Path) -> None:
    """The choices follow from the archive in an empty home, and nothing of the test split is known before them."""
    trials = json.loads((home() / "studies" / "real.json").read_text())["trials"]
    roles = {trial["run_id"]: trial["role"] for trial in trials}
    for run in list_runs():
        found = {name.partition("/")[0] for name in History.load(run.path).metrics}
        assert ("test" in found) == (roles[run.run_id] in {"report", "control"}), roles[run.run_id]
    _call(folder, "archive", "@real", "--to", "real.tar.gz")
    shutil.rmtree(home())
    lines = _call(folder, "study", "study.yaml", "--from", "real.tar.gz").splitlines()
    assert lines[0] == f"real: choices rebuilt from {len(trials)} trials of real.tar.gz"
    chosen = [line for line in lines[1:] if line.endswith(", as the study chose")]
    assert {line.partition(":")[0] for line in chosen} >= {"dense", "topk"}
    assert not [line for line in lines if line.startswith("fault")]


def _study(folder: Path, tiny: Path, text: str) -> str:
    (folder / "base.yaml").write_text(BASE.format(folder=tiny))
    (folder / "study.yaml").write_text(text)
    return _call(folder, "study", "study.yaml")


def _compare(folder: Path) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(_call(folder, "compare", "--study", "real", "-o", "json"))
    return found


def _call(folder: Path, *words: str) -> str:
    done = subprocess.run([*REAL, *words], capture_output=True, text=True, cwd=folder, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
