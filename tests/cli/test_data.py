"""``sparsebp data`` and what ``validate`` and ``show`` say of the data, as real processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.cli.answer.recipe_record import DataAnswer
from tests.cli.conftest import REAL, Cli, environment

RECIPE = """\
version: 1
name: pairs
model: {name: austen-llama}
dataset: {name: pairs.jsonl, format: completion, max_seq_length: 24}
training: {max_steps: 2, per_device_train_batch_size: 2}
measure: {eval_examples: 2, probe_every: null, fidelity_every: null}
target: {threads: 1}
tracking: {uri: "sqlite:////dev/null/m.db"}  # told before mlflow is imported, which is slow
"""

pytestmark = pytest.mark.slow


def write_recipe(folder: Path) -> Path:
    """Forty pairs, a quarter of which have prompts that are too long."""
    rows = [{"prompt": "film " * (60 if n % 4 == 0 else 2) + str(n), "completion": " very good"} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "pairs.yaml"
    file.write_text(RECIPE)
    return file


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``data`` answers: a process that imports torch, for all tests of it."""
    folder = tmp_path_factory.mktemp("counted")
    command = [*REAL, "data", str(write_recipe(folder)), "-o", "json"]
    done = subprocess.run(command, env=environment() | {"SPARSEBP_HOME": str(folder)}, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_data_counts_every_row_and_marks_what_is_trained(counted: dict[str, Any]) -> None:
    splits = counted["splits"].values()
    assert list(counted["splits"]) == ["train", "validation"]
    assert [split["rows"] for split in splits] == [36, 4]
    assert sum(split["dropped"].get("the prompt fills max_seq_length", 0) for split in splits) == 10
    assert sum(split["examples"] for split in splits) == 30
    for split, examples in counted["first"].items():
        for example in examples:
            assert len(example["ids"]) == len(example["tokens"]) == len(example["trained"])
            assert "".join(text for text, is_trained in example["parts"] if is_trained) == " very good<eos>"
            share = counted["splits"][split]["targets"] / counted["splits"][split]["examples"]
            assert sum(example["trained"]) == share


def test_the_table_shows_what_is_trained_and_what_was_lost(
    call: Cli, recipe: Path, counted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {key: value for key, value in counted.items() if key in DataAnswer.__annotations__}
    monkeypatch.setattr("sparsebp_cli.cli.worker_answer.ask_worker", lambda *_: answer)
    shown = call("data", recipe)
    assert shown.returncode == 0, shown.stderr
    assert "[[ very good<eos>]]" in shown.stdout
    assert "dropped: the prompt fills max_seq_length" in shown.stdout
    assert "warning: data: " in shown.stdout
    assert "with a fault in their text" in shown.stdout


def test_validate_warns_of_lost_rows_and_refuses_where_nothing_is_left(cli: Cli, recipe: Path) -> None:
    done = cli("validate", recipe, real=True)
    assert done.returncode == 0, done.stderr
    assert "train rows are dropped: the prompt fills max_seq_length" in done.stdout
    recipe.write_text(RECIPE.replace("24", "8"))
    rows = [{"prompt": "film " * 60 + str(n), "completion": " very good"} for n in range(40)]
    (recipe.parent / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = cli("validate", recipe, real=True)
    assert done.returncode == 2
    assert "the training split has no example: in 36 rows, the prompt fills max_seq_length" in done.stderr


def test_validate_names_prompts_that_a_model_is_sent_in_other_tokens(cli: Cli, recipe: Path) -> None:
    rows = [{"prompt": f"film {n}:" + (" " if n % 4 == 0 else "\n"), "completion": "good"} for n in range(40)]
    (recipe.parent / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = cli("validate", recipe, real=True)
    assert done.returncode == 0, done.stderr
    assert "prompts are tokenised differently in generation than in training (first: " in done.stdout


def test_a_run_keeps_the_census_and_show_prints_it(
    cli: Cli, call: Cli, recipe: Path, tmp_path: Path, counted: dict[str, Any]
) -> None:
    home = {"SPARSEBP_HOME": str(tmp_path / "home")}
    done = cli("run", recipe, real=True, **home)
    assert done.returncode == 0, done.stderr
    shown = json.loads(call("show", "@last", "-o", "json").stdout)
    assert shown["facts"]["census"] == {key: counted[key] for key in ("splits", "shared")}
    assert [note["text"] for note in shown["notes"] if note["text"].startswith("data: ")] == [
        text for _, text in counted["warnings"]
    ]
    table = call("show", "@last", "--all").stdout
    assert "dropped: the prompt fills max_seq_length" in table
    assert "census:" not in table
