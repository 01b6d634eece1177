"""``training.num_train_epochs``: the client counts the examples and plans the steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RECIPE = """\
version: 1
name: rows
model: {{name: austen-llama}}
dataset: {{name: rows.jsonl, format: completion, eval_fraction: 0.1}}
training: {{{training}, per_device_train_batch_size: 4, gradient_accumulation_steps: 2}}
{more}
"""


@pytest.fixture
def write(tmp_path: Path):
    rows = [{"prompt": f"{number}:", "completion": f" answer {number}"} for number in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def to_file(training: str, more: str = "") -> Path:
        file = tmp_path / "rows.yaml"
        file.write_text(RECIPE.format(training=training, more=more))
        return file

    return to_file


def plan_of(call, file: Path, *words: object) -> tuple[dict, str]:
    done = call("run", file, "--dry-run", "-o", "json", *words)
    assert done.returncode == 0, done.stderr
    (planned,) = json.loads(done.stdout)["plans"]
    return planned["plan"]["recipe"]["training"], done.stderr


@pytest.mark.slow
def test_epochs_become_the_steps_that_pass_over_all_examples(call, write) -> None:
    counted = json.loads(call("data", write("max_steps: 3"), "-o", "json").stdout)["splits"]["train"]["examples"]
    assert 80 <= counted < 100
    steps = -(-5 * counted // (2 * 8))
    # As from the command line, where the steps that a recipe has are taken out.
    changes = ("--set", "~training.max_steps", "--set", "training.num_train_epochs=2.5")
    planned, shown = plan_of(call, write("max_steps: 3"), *changes)
    assert planned["max_steps"] == steps
    assert f"2.5 epochs of {counted} examples, 8 per step: {steps} steps" in shown
    # It is the same training as that of a recipe with these steps.
    assert plan_of(call, write(f"max_steps: {steps}"))[0] == planned
    assert planned["num_train_epochs"] is None


def test_a_key_for_each_is_one_too_many(call, write) -> None:
    done = call("validate", write("num_train_epochs: 1, max_steps: 3"))
    assert done.returncode == 2
    assert "give only one of max_steps and num_train_epochs, got both (3 and 1)" in done.stderr


def test_epochs_of_data_elsewhere_are_refused(call, write) -> None:
    file = write("num_train_epochs: 1", "target: {kind: slurm, host: ssh://cluster, folder: /shared/runs}")
    file.write_text(file.read_text().replace("rows.jsonl", "/elsewhere/rows.jsonl"))
    done = call("validate", file)
    assert done.returncode == 2
    assert "training.num_train_epochs: cannot count the examples on this machine (" in done.stderr


def test_a_study_counts_steps(call, write, tmp_path: Path) -> None:
    base = write("num_train_epochs: 1")
    study = tmp_path / "study.yaml"
    arms = "arms: {dense: {}, half: {policy: [{name: topk, keep: 0.5}]}}"
    study.write_text(f"version: 1\nstudy: s\nbase: {base.name}\n{arms}\nseeds: {{report: 0-2}}\n")
    done = call("validate", study)
    assert done.returncode == 2
    assert "a study needs training.max_steps" in done.stderr
