"""The loss of every held-out example, beside the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparsebp_cli.run import History
from sparsebp_cli.worker.evaluate import MOST_EXAMPLES, ExampleLosses
from tests.worker.conftest import work


def test_the_losses_of_the_examples_average_to_the_evaluation(tiny_recipe: Any, prepared: Any) -> None:
    run = prepared(tiny_recipe())
    assert work(run) == 0, run.log_file.read_text()
    history = History.load(run.path)
    assert list(history.examples) == [10]  # at the end alone
    found = history.examples[10]
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


def test_no_more_examples_are_kept_than_a_journal_should_hold() -> None:
    found = ExampleLosses([0.0] * (MOST_EXAMPLES - 1), [1] * (MOST_EXAMPLES - 1))
    found.add(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    assert len(found.loss) == len(found.targets) == MOST_EXAMPLES
