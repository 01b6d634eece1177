"""Pairs of texts with classes or numbers are judged as by GLUE, scikit-learn, numpy and scipy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import f1_score, matthews_corrcoef
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sparsebp_cli.errors import DataError, RecipeError
from sparsebp_cli.recipe.loader import load_recipe
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.source.column import as_rows, read_numbers
from sparsebp_cli.worker.evaluate import correlate, count_classes, find_f1, matthews
from tests.worker.conftest import LLAMA, work

Prepare = Callable[[Recipe], RunFolder]
PAIRS = {"text_column": "sentence1", "text_pair_column": "sentence2", "max_seq_length": 32}


@pytest.mark.parametrize("num_classes", [2, 3, 7])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_mcc_and_f1_are_those_of_scikit_learn(num_classes: int, share: float) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    labels_B, other_B = torch.randint(num_classes, (2, 200), generator=generator)
    predicted_B = torch.where(torch.rand(200, generator=generator) < share, labels_B, other_B)
    counts_3C = count_classes(predicted_B, labels_B, num_classes).double()
    assert matthews(counts_3C) == pytest.approx(matthews_corrcoef(labels_B, predicted_B), abs=1e-12)
    each = f1_score(labels_B, predicted_B, average=None)
    assert find_f1(counts_3C).tolist() == pytest.approx(each.tolist())


def test_mcc_of_one_class_alone_is_zero() -> None:
    counts_3C = count_classes(torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1]), 2)
    assert matthews(counts_3C) == matthews_corrcoef([0, 0, 1, 1], [0, 0, 0, 0]) == 0.0


def test_correlations_are_those_of_numbers_and_of_ranks() -> None:
    first = [0.1, 2.0, 2.0, -1.0, 7.5, 3.0]
    second = [1.0, 5.0, 4.0, 0.0, 5.0, 2.0]
    pearson, spearman = correlate(list(zip(first, second, strict=True)))
    assert pearson == pytest.approx(np.corrcoef(first, second)[0, 1])
    ranks = [stats.rankdata(side) for side in (first, second)]
    assert spearman == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert correlate([(1.0, 2.0), (1.0, 3.0)]) == (0.0, 0.0)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name, count in (("train", 48), ("validation", 13), ("test", 11)):
        rows = [
            {"sentence1": f"the fox {n % 5}", "sentence2": f"dog {n % 3} jumps" * (n % 4 + 1), "label": n % 5 / 2}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_a_regression_is_judged_as_transformers_and_scipy_judge_it(
    tiny_recipe: Any, prepared: Prepare, pairs: Path
) -> None:
    dataset = {"name": str(pairs), "format": "regression", "eval_split": "validation", "test_split": "test"} | PAIRS
    measure = {"eval_every": 5, "eval_examples": None, "fidelity_every": None}
    runs = []
    for policy in ("dense", "lossless"):
        recipe = tiny_recipe(
            model={"config": LLAMA}, dataset=dataset, measure=measure, policy=[{"name": policy}],
            checkpoint={"keep_best": "eval/pearson"},
        )  # fmt: skip
        runs.append(prepared(recipe))
        assert work(runs[-1]) == 0, runs[-1].log_file.read_text()
    history = History.load(runs[0].path)
    place = runs[0].path / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(place), AutoModelForSequenceClassification.from_pretrained(place)
    assert model.config.num_labels == 1
    rows = [json.loads(line) for line in (pairs / "test.jsonl").read_text().splitlines()]
    predicted, labels, losses = [], [], []
    for row in rows:
        inputs = tokenizer(row["sentence1"], row["sentence2"], return_tensors="pt")
        with torch.no_grad():
            output = model.eval()(**inputs, labels=torch.tensor([row["label"]]))
        predicted.append(float(output.logits))
        labels.append(row["label"])
        losses.append(float(output.loss))
    assert history.last("test/loss") == pytest.approx(np.mean(losses), rel=1e-4)
    assert history.test_examples[10]["loss"] == pytest.approx(losses, rel=1e-3)
    assert history.last("test/pearson") == pytest.approx(stats.pearsonr(predicted, labels).statistic, abs=1e-4)
    assert history.last("test/spearman") == pytest.approx(stats.spearmanr(predicted, labels).statistic, abs=1e-4)
    assert "eval/accuracy" not in history.metrics
    exact = History.load(runs[1].path)
    assert [*exact.series("train/loss").values()] == pytest.approx([*history.series("train/loss").values()], rel=1e-4)


@pytest.mark.parametrize("policy", ["uniform", "selective-backprop"])
def test_policies_that_compute_a_cross_entropy_refuse_a_regression(tmp_path: Path, policy: str) -> None:
    file = tmp_path / "r.yaml"
    text = "version: 1\nmodel: {name: austen-llama}\ndataset: {name: austen, format: regression}\n"
    file.write_text(f"{text}policy: {policy}\n")
    with pytest.raises(RecipeError, match=r"with dataset.format: regression is not supported: .* cross-entropy"):
        load_recipe(file)


@pytest.mark.parametrize("value", [True, "3", None, float("nan"), float("inf")])
def test_a_label_of_a_regression_is_a_finite_number(value: object) -> None:
    with pytest.raises(DataError, match="row 2: column 'label' must be a finite number, got"):
        read_numbers(as_rows([{"label": 1}, {"label": value}], "here"), "label")
