"""Micro-batches of similar examples: every example once an epoch, the same after a resume, and what prefixes gain."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.data import EncodedExample
from sparsebp_cli.worker.grouping import GroupBy


def make_examples(number: int, *, prompts: int = 10, prompt_length: int = 20) -> list[EncodedExample]:
    """Of several lengths; the first token after the prompt is the example's number."""
    random = np.random.default_rng(0)
    found = []
    for example in range(number):
        prompt = np.full(prompt_length, 1000 + example % prompts)
        ids = np.concatenate([prompt, [example], random.integers(3, 60, int(random.integers(1, 60)))]).astype(np.int64)
        found.append(EncodedExample(ids, ids.copy()))
    return found


def names(batch: Any) -> list[int]:
    return [int(row[20]) for row in batch["input_ids"]]


@pytest.mark.parametrize("group_by", ["length", "prefix"])
def test_every_example_is_trained_once_an_epoch_in_an_order_of_its_own(group_by: GroupBy) -> None:
    examples = make_examples(103)
    order = BatchOrder(examples, 4, seed=1, pad_token_id=0, group_by=group_by)
    seen = [name for number in range(103) for name in names(order[number])]  # 4 epochs
    epochs = [seen[start : start + 103] for start in range(0, len(seen), 103)]
    assert all(sorted(epoch) == list(range(103)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = BatchOrder(examples, 4, seed=1, pad_token_id=0, group_by=group_by)
    assert names(other[77]) == seen[77 * 4 : 78 * 4]  # without those before it


def test_batches_by_length_have_little_padding_and_no_order() -> None:
    examples = make_examples(400)

    def padding(group_by: GroupBy | None) -> tuple[float, list[int]]:
        order = BatchOrder(examples, 8, seed=0, pad_token_id=0, group_by=group_by)
        batches = [order[number]["input_ids"] for number in range(50)]
        return sum(float((ids == 0).sum()) for ids in batches), [ids.shape[1] for ids in batches]

    plain, grouped = padding(None), padding("length")
    assert grouped[0] < 0.3 * plain[0]  # lengths are padded to multiples of 8
    assert grouped[1] not in (sorted(grouped[1]), sorted(grouped[1], reverse=True))


def test_batches_by_prefix_keep_a_prompt_together() -> None:
    order = BatchOrder(make_examples(80), 8, seed=0, pad_token_id=0, group_by="prefix")
    prompts = [Counter(int(row[0]) for row in order[number]["input_ids"]) for number in range(10)]
    assert all(set(counted.values()) == {8} for counted in prompts)
    order = BatchOrder(make_examples(80), 8, seed=0, pad_token_id=0)
    assert all(len({int(row[0]) for row in order[number]["input_ids"]}) > 2 for number in range(10))
