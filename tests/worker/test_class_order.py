"""A classification has the classes of a pretrained head in the head's order, and its files name the trained classes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History
from sparsebp_cli.source.column import name_classes
from sparsebp_cli.worker.data import build_data
from sparsebp_cli.worker.data_preview import take_census
from sparsebp_cli.worker.model import build_tokenizer
from tests.tokenizers import ENCODERS, WORDS
from tests.worker.conftest import LLAMA, work

ROWS = [(f"{WORDS[n % 8]} {WORDS[n // 8]} {WORDS[n % 5]}", WORDS[n % 5]) for n in range(60)]  # no text twice
SIZES = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder": ("Bert", {"model_type": "bert", **SIZES}),
    "decoder": ("XLMRoberta", LLAMA),
    "encoder-decoder": (
        "T5",
        {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "decoder_start_token_id": 0},
    ),
}


@pytest.mark.parametrize(
    ("head", "labels", "expected"),
    [
        (["positive", "negative"], ["negative", "positive", "negative"], ["positive", "negative"]),
        (["NEUTRAL", "Bad", "GOOD"], ["bad", "good", "neutral"], ["neutral", "bad", "good"]),
        (["2", "0", "1"], ["0", "1", "2"], ["2", "0", "1"]),
        (["b", "B"], ["B", "b"], ["b", "B"]),
        (["a", "A"], ["a", "c"], ["a", "c"]),
        (["a", "a"], ["a", "A"], ["A", "a"]),
        (["LABEL_0", "LABEL_1"], ["1", "0"], ["0", "1"]),
        (["c", "b", "a"], ["a", "b"], ["a", "b"]),
        ([], ["10", "9"], ["9", "10"]),
    ],
)
def test_classes_have_the_order_of_a_head_that_names_the_same(
    head: Sequence[str], labels: Sequence[str], expected: list[str]
) -> None:
    assert name_classes(labels, head) == expected


def write_model(folder: Path, family: str, names: Sequence[str]) -> Path:
    kind, config = FAMILIES[family]
    tokenizer = ENCODERS[kind]()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    given = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "dropout_rate": 0.0} | config
    given |= {"eos_token_id": tokenizer.eos_token_id} if family == "encoder-decoder" else {}
    made = AutoConfig.for_model(**given, id2label=dict(enumerate(names)))
    made.label2id = {name: number for number, name in enumerate(names)}
    AutoModelForSequenceClassification.from_config(made).save_pretrained(folder)
    return folder


def make_recipe(tiny_recipe: Any, folder: Path, pair: bool = False, **sections: Any) -> Recipe:
    rows = [{"text": text, "other": text[::-1], "label": label} for text, label in ROWS]
    (folder.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"name": str(folder.parent / "rows.jsonl"), "format": "classification", "max_seq_length": 16}
    dataset |= {"columns": {"text": ["text", "other"]}} if pair else {}
    values = tiny_recipe(training={"max_steps": 2, "learning_rate": 1e-9}, **sections).model_dump()
    recipe: Recipe = Recipe.model_validate(values | {"model": {"name": str(folder)}, "dataset": dataset})
    return recipe


def share_right(folder: Path, rows: Sequence[tuple[str, str]]) -> float:
    """The accuracy that a user of transformers measures by the names in the model's config."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = 0
    for text, label in rows:
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits
        right += model.config.id2label[int(logits.argmax())] == label
    return right / len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pretrained_head_is_trained_and_measured_by_its_own_names(
    family: str, tiny_recipe: Any, prepared: Any, tmp_path: Path
) -> None:
    names = ["film", "good", "bad", "the", "is"]
    folder = write_model(tmp_path / "base", family, names)
    recipe = make_recipe(tiny_recipe, folder, checkpoint={"every": 2, "keep_best": "eval/accuracy"})
    run = prepared(recipe)
    assert work(run) == 0, (run.path / "worker.log").read_text()
    history = History.load(run.path)
    assert history.facts["label_names"] == names
    assert list(history.facts["census"]["splits"]["validation"]["classes"]) == names
    data = build_data(recipe.dataset, build_tokenizer(recipe.model))
    held_out = [(str(row["text"]), str(row["label"])) for row in data.held_out_rows]
    assert history.series("eval/accuracy")[0] == pytest.approx(share_right(folder, held_out))
    for saved in (run.path / "model", run.path / "best"):
        config = json.loads((saved / "config.json").read_text())
        assert config["id2label"] == {str(number): name for number, name in enumerate(names)}
        assert config["label2id"] == {name: number for number, name in enumerate(names)}


@pytest.mark.slow
def test_another_head_keeps_the_sorted_order_and_the_files_name_the_trained_classes(
    tiny_recipe: Any, prepared: Any, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "base", "encoder", ["e", "d", "c", "b", "a"])
    run = prepared(make_recipe(tiny_recipe, folder, pair=True))
    assert work(run) == 0, (run.path / "worker.log").read_text()
    names = sorted({label for _, label in ROWS})
    assert History.load(run.path).facts["label_names"] == names
    config = json.loads((run.path / "model" / "config.json").read_text())
    assert config["id2label"] == {str(number): name for number, name in enumerate(names)}
    assert config["label2id"] == {name: number for number, name in enumerate(names)}


@pytest.mark.slow
def test_adapters_are_merged_into_a_model_that_names_the_trained_classes(
    tiny_recipe: Any, prepared: Any, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "base", "encoder", ["x", "film"])
    values = make_recipe(tiny_recipe, folder).model_dump()
    run = prepared(Recipe.model_validate(values | {"model": {"name": str(folder), "lora": {"r": 2}}}))
    # Five classes on a head of two: the head of the files does not fit.
    assert work(run) in {1, 2}
    folder = write_model(tmp_path / "fits", "encoder", ["the", "is", "film", "bad", "good"])
    run = prepared(Recipe.model_validate(values | {"model": {"name": str(folder), "lora": {"r": 2}}}))
    assert work(run) == 0, (run.path / "worker.log").read_text()
    names = ["the", "is", "film", "bad", "good"]
    config = json.loads((run.path / "model" / "config.json").read_text())
    assert list(config["id2label"].values()) == names == History.load(run.path).facts["label_names"]


@pytest.mark.slow
def test_data_shows_the_classes_in_the_order_of_the_head(tiny_recipe: Any, prepared: Any, tmp_path: Path) -> None:
    names = ["is", "film", "good", "bad", "the"]
    run = prepared(make_recipe(tiny_recipe, write_model(tmp_path / "base", "encoder", names)))
    found: Any = take_census(run.plan_file)
    assert list(found["splits"]["train"]["classes"]) == names
    labels = dict(ROWS)
    for shown in found["first"]["train"]:
        assert shown["label"] == labels[" ".join(shown["tokens"][1:-1])]


@pytest.mark.slow
def test_a_checkpoint_with_another_order_of_classes_is_refused(tiny_recipe: Any, prepared: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "base", "encoder", ["LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3", "LABEL_4"])
    recipe = make_recipe(tiny_recipe, folder, checkpoint={"every": 1, "keep_last": 1})
    run, run_again = prepared(recipe), prepared(recipe)
    assert work(run) == 0
    shutil.copytree(run.path / "checkpoints", run_again.path / "checkpoints")
    write_model(folder, "encoder", ["the", "film", "is", "good", "bad"])
    assert work(run_again) == 2
    end = History.load(run_again.path).ends[-1]
    assert [change[0] for change in end["changes"]] == ["data"]
