"""``sparsebp data`` and what ``validate`` and ``show`` say of the data, as real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

RECIPE = """\
version: 1
name: pairs
model: {name: austen-llama}
dataset: {name: pairs.jsonl, format: completion, max_seq_length: 24}
training: {max_steps: 2, per_device_train_batch_size: 2}
measure: {eval_examples: 2, probe_every: null, fidelity_every: null}
target: {threads: 1}
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Forty pairs, a quarter of which have prompts that are too long."""
    rows = [{"prompt": "film " * (60 if n % 4 == 0 else 2) + str(n), "completion": " very good"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "pairs.yaml"
    file.write_text(RECIPE)
    return file


def test_data_counts_every_row_and_marks_what_is_trained(cli: Cli, recipe: Path) -> None:
    done = cli("data", recipe, "-o", "json", real=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    splits = found["splits"].values()
    assert list(found["splits"]) == ["train", "validation"]
    assert [split["rows"] for split in splits] == [36, 4]
    assert sum(split["dropped"].get("the prompt fills max_seq_length", 0) for split in splits) == 10
    assert sum(split["examples"] for split in splits) == 30
    for split, examples in found["first"].items():
        for example in examples:
            assert len(example["ids"]) == len(example["tokens"]) == len(example["trained"])
            assert "".join(text for text, is_trained in example["parts"] if is_trained) == " very good<eos>"
            share = found["splits"][split]["targets"] / found["splits"][split]["examples"]
            assert sum(example["trained"]) == share
    shown = cli("data", recipe, real=True)
    assert shown.returncode == 0, shown.stderr
    assert "[[ very good<eos>]]" in shown.stdout
    assert "dropped: the prompt fills max_seq_length" in shown.stdout
    assert "warning: data: " in shown.stdout


def test_validate_warns_of_lost_rows_and_refuses_where_nothing_is_left(cli: Cli, recipe: Path) -> None:
    done = cli("validate", recipe, real=True)
    assert done.returncode == 0, done.stderr
    assert "train rows are dropped: the prompt fills max_seq_length" in done.stdout
    recipe.write_text(RECIPE.replace("24", "8"))
    rows = [{"prompt": "film " * 60 + str(n), "completion": " very good"} for n in range(40)]
    (recipe.parent / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = cli("validate", recipe, real=True)
    assert done.returncode == 2
    assert "the training split has no example: of 36 rows the prompt fills max_seq_length" in done.stderr


def test_a_run_keeps_the_census_and_show_prints_it(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    home = {"SPARSEBP_HOME": str(tmp_path / "home")}
    counted = json.loads(cli("data", recipe, "-o", "json", real=True).stdout)
    done = cli("run", recipe, real=True, **home)
    assert done.returncode == 0, done.stderr
    shown = json.loads(cli("show", "@last", "-o", "json", real=True, **home).stdout)
    assert shown["facts"]["census"] == {key: counted[key] for key in ("splits", "shared")}
    assert [note["text"] for note in shown["notes"] if note["text"].startswith("data: ")] == [
        text for _, text in counted["warnings"]
    ]
    table = cli("show", "@last", real=True, **home).stdout
    assert "dropped: the prompt fills max_seq_length" in table
    assert "census:" not in table
