"""Classes are judged as by GLUE and scikit-learn."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import f1_score, matthews_corrcoef

from sparsebp_cli.worker.evaluate import count_classes, find_f1, matthews


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
