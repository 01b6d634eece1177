"""The loss of every held-out example, beside the mean."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparsebp_cli.compare import compare_runs
from sparsebp_cli.run import History
from sparsebp_cli.worker.data import EncodedExample
from sparsebp_cli.worker.evaluate import (
    MOST_EXAMPLES,
    ExampleLosses,
    _share,
    count_classes,
    evaluate,
    evaluation_batches,
    macro_f1,
)
from sparsebp_cli.worker.process import Ranks
from tests.worker.conftest import work


def test_the_losses_of_the_examples_average_to_the_evaluation(tiny_recipe: Any, prepared: Any) -> None:
    run = prepared(tiny_recipe())
    assert work(run) == 0, run.log_file.read_text()
    history = History.load(run.path)
    assert list(history.examples) == [10]  # at the end alone
    found = history.examples[10]
    assert len(found["documents"]) == len(found["loss"])
    assert len(found["loss"]) == len(found["targets"]) == 8
    assert set(found["targets"]) == {15}
    assert sum(found["loss"]) / 8 == pytest.approx(history.last("eval/loss"), rel=1e-5)


def test_an_example_weighs_its_targets_and_masked_tokens_weigh_nothing() -> None:
    logits_BTV, labels_BT = torch.randn(2, 5, 7), torch.tensor([[1, 2, 3, 4, 5], [-100, -100, -100, 6, -100]])
    found = ExampleLosses()
    found.add(logits_BTV, labels_BT)
    assert found.targets == [4, 1]
    per_token = nn.functional.cross_entropy(logits_BTV[0, :4], labels_BT[0, 1:])
    assert found.loss[0] == pytest.approx(float(per_token), rel=1e-5)
    assert found.loss[1] == pytest.approx(-float(logits_BTV[1, 2].log_softmax(-1)[6]), rel=1e-5)


def test_a_classification_has_one_target_an_example() -> None:
    logits_BC, labels_B = torch.randn(3, 4), torch.tensor([0, 3, 1])
    found = ExampleLosses()
    found.add(logits_BC, labels_B)
    assert found.targets == [1, 1, 1]
    assert sum(found.loss) / 3 == pytest.approx(float(nn.functional.cross_entropy(logits_BC, labels_B)), rel=1e-5)


def test_macro_f1_weighs_classes_alike_and_leaves_out_those_that_do_not_occur() -> None:
    labels_B = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    predicted_B = torch.tensor([0, 0, 0, 1, 1, 2, 0])
    counts_3C = count_classes(predicted_B, labels_B, 5)  # nothing is in the last two classes
    assert counts_3C.tolist() == [[3, 1, 0, 0, 0], [4, 2, 1, 0, 0], [4, 2, 1, 0, 0]]
    assert macro_f1(counts_3C) == pytest.approx((0.75 + 0.5 + 0.0) / 3)
    never_right_3C = count_classes(torch.tensor([3]), torch.tensor([0]), 5)
    assert macro_f1(never_right_3C) == 0.0  # a class that is only predicted counts, too


def test_an_evaluation_in_batches_counts_classes_over_all_of_them() -> None:
    class Model(nn.Module):
        def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
            return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits, labels))

    logits_BC, labels_B = torch.randn(9, 3), torch.tensor([0, 1, 2, 0, 0, 1, 2, 1, 0])
    batches = [{"logits": logits_BC[i : i + 4], "labels": labels_B[i : i + 4]} for i in (0, 4, 8)]
    found = evaluate(Model(), batches, torch.device("cpu"))
    assert found["eval/accuracy"] == pytest.approx(float((logits_BC.argmax(-1) == labels_B).float().mean()))
    assert found["eval/macro_f1"] == pytest.approx(macro_f1(count_classes(logits_BC.argmax(-1), labels_B, 3)))


def test_no_more_examples_are_kept_than_a_journal_should_hold() -> None:
    found = ExampleLosses([0.0] * (MOST_EXAMPLES - 1), [1] * (MOST_EXAMPLES - 1))
    found.add(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    assert len(found.loss) == len(found.targets) == MOST_EXAMPLES


def test_runs_of_two_batch_sizes_are_compared_on_the_same_examples(tiny_recipe: Any, prepared: Any) -> None:
    runs = []
    for batch_size in (4, 2):
        training = {"max_steps": 2, "per_device_train_batch_size": batch_size}
        measure = {"eval_examples": 6, "fidelity_every": None}
        runs.append(prepared(tiny_recipe(name=f"batch-{batch_size}", training=training, measure=measure)))
        assert work(runs[-1]) == 0, runs[-1].log_file.read_text()
    assert [len(History.load(run.path).examples[2]["loss"]) for run in runs] == [6, 6]
    found = compare_runs(runs)
    assert not [line for line in found.warnings if "not compared" in line]
    other = found.groups[1]
    assert other.quality.difference is not None
    assert [one.difference.n for one in other.quality.examples] == [6]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 5])
def test_which_examples_are_evaluated_depends_on_no_batch_size_and_no_ranks(
    tiny_recipe: Any, num_ranks: int, batch_size: int
) -> None:
    examples = [EncodedExample(np.full(8, number), np.full(8, number)) for number in range(20)]
    for own_batch in (None, 3):
        measure = {"eval_examples": 7, "per_device_eval_batch_size": own_batch}
        recipe = tiny_recipe(training={"per_device_train_batch_size": batch_size}, measure=measure)
        seen = []
        chosen = examples[: recipe.measure.eval_examples]
        for batch in evaluation_batches(recipe, chosen, 0, num_ranks):
            assert len(batch["labels"]) <= (own_batch or batch_size) * num_ranks
            for rank in range(num_ranks):
                own, counts = _share(batch, Ranks(rank, num_ranks))
                seen += own["input_ids"][:, 0].tolist() if counts else []
        assert seen == list(range(7))


def test_the_test_split_is_read_once_after_the_last_step_and_changes_nothing_else(
    tiny_recipe: Any, prepared: Any, tmp_path: Any
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name, count in (("train", 60), ("validation", 12), ("test", 12)):
        rows = "".join(json.dumps({"text": f"{name} {n} the quick brown fox {n * n}"}) + "\n" for n in range(count))
        (data / f"{name}.jsonl").write_text(rows)
    measure = {"eval_every": 2, "eval_examples": 3, "fidelity_every": None}
    found = []
    for more in ({}, {"test_split": "test"}):
        dataset = {"name": str(data), "eval_split": "validation", "max_seq_length": 16} | more
        run = prepared(tiny_recipe(dataset=dataset, training={"max_steps": 4}, measure=measure))
        assert work(run) == 0, run.log_file.read_text()
        found.append((run, History.load(run.path)))
    (plain, without), (tested, history) = found
    assert history.series("eval/loss") == without.series("eval/loss")
    files = [run.path / "model" / "model.safetensors" for run in (plain, tested)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not without.series("test/loss")
    assert not without.test_examples
    assert list(history.series("test/loss")) == [4]
    losses = history.test_examples[4]
    assert len(losses["loss"]) == history.facts["test_examples"] > 3  # all of it, whatever eval_examples says
    assert sum(losses["loss"]) / len(losses["loss"]) == pytest.approx(history.last("test/loss"), rel=1e-5)
    assert len(history.examples[4]["loss"]) == 3
    assert history.last("test/loss") != history.last("eval/loss")
