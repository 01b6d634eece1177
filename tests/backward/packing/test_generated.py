"""Random batches of every kind that packing tells apart are packed right, or run plainly."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
)

import sparsebp_cli as sbp
from sparsebp_cli.backward.kind.packing import groups, layout
from sparsebp_cli.backward.kind.packing.batch import BatchFacts, read_mask, read_positions
from sparsebp_cli.backward.kind.packing.sequence import find_begins
from tests.backward.isolation.enumeration import enlarge
from tests.backward.token.test_every_decoder import tiny

from .generated import IGNORED, NAMES, Judge, changed_families, draw_facts, make_batch

OTHERS: tuple[tuple[Any, Any], ...] = (
    (GPT2Config, GPT2LMHeadModel),
    (OPTConfig, OPTForCausalLM),
    (BertConfig, BertLMHeadModel),
)
RUNS = {torch.float32: 2, torch.bfloat16: 1}  # of each family, three batches each


def test_a_batch_has_the_facts_that_were_drawn() -> None:
    rng, seen = random.Random(0), set[tuple[str, bool]]()
    stack = torch.nn.Linear(1, 1)  # it has no position numbers of its own
    for _ in range(400):
        drawn = draw_facts(rng)
        batch = make_batch(drawn, rng)
        size = (batch["labels"].shape[0], batch["labels"].shape[1])
        real, position = read_mask(batch, size), read_positions(stack, batch, size)
        assert real is not None
        assert position is not None
        read = np.zeros(size, bool)
        read[:, :-1] = (batch["labels"][:, 1:] != IGNORED).numpy()
        begins = find_begins(batch, position, uses_cache=batch.get("use_cache", True))
        found = BatchFacts.of(batch, real, read, position, begins)
        assert found.signature == drawn.signature
        seen |= {(name, getattr(found, name)) for name in NAMES}
    assert seen == {(name, value) for name in NAMES for value in (False, True)}


@pytest.mark.parametrize("dtype", RUNS)
def test_no_random_batch_has_a_wrong_gradient(dtype: torch.dtype) -> None:
    families = [tiny(*classes) for classes in OTHERS]
    for model in families:
        enlarge(model)
    judges = [Judge(model, dtype) for model in (*families, *(changed for _, changed in changed_families()))]
    for number, judge in enumerate(judges):
        for run in range(RUNS[dtype]):
            judge.judge(1000 * number + run, 3)
    counts = [judge.count for judge in judges]
    assert [case for count in counts for case in count.cases] == []
    assert sum(count.packed for count in counts) > 0.4 * sum(count.judged for count in counts)


@pytest.mark.parametrize("dtype", RUNS)
@pytest.mark.parametrize("wrong", ["window", "row"])
def test_a_wrong_mask_or_a_wrong_row_is_counted(
    wrong: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts nothing wrong must be able to count; the comparison of lossless itself is switched off here."""
    model: Any = next(changed for name, changed in changed_families() if "Mistral" in name)  # with a window of five
    made, arranged = groups.make_group, layout.arrange_segments
    if wrong == "window":  # as if it had six keys

        def make_wrong(*args: Any, **kwargs: Any) -> Any:
            group = made(*args, **kwargs)
            return replace(group, key_GK=group.key_GK + (group.key_GK > 3).long())

        monkeypatch.setattr(layout, "make_group", make_wrong)
    else:

        def arrange_wrong(*args: Any, **kwargs: Any) -> Any:
            found = arranged(*args, **kwargs)
            found.position_N[-5] += 3  # of one row
            return found

        monkeypatch.setattr(layout, "arrange_segments", arrange_wrong)
    make_policy = sbp.make_policy
    monkeypatch.setattr(sbp, "make_policy", lambda name, **_: make_policy(name, verify="never"))
    judge = Judge(model, dtype)
    for seed in range(4):
        judge.judge(seed, 2)
    assert judge.count.wrong > 0.5 * (judge.count.packed + judge.count.wrong) > 0
