"""Padding that is trained, and masks of four dimensions: what a row looks at is up to the model as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .case import Batch, assert_near, make_batch, plain_step, random_ids, step
from .test_families import decoder

EAGER = {"attn_implementation": "eager"}


def trained_padding(mask: Any) -> Batch:
    """Return a batch whose labels train padding: the first token of an example that is padded on the left, by the
    padding before it, or, on the right, whatever the collator left there."""
    batch = make_batch("scattered", mask)
    real = batch.inputs["attention_mask"].bool()
    trained = batch.trained.clone()
    trained[:, :-1] |= real[:, 1:] & ~real[:, :-1]
    if mask == "right":
        trained |= ~real
        batch.inputs["labels"] = batch.inputs["input_ids"].clone()
    trained[:, -1] = False
    assert (trained & ~real).any()
    return Batch(batch.inputs, trained, trained)


@pytest.mark.parametrize("mask", ["left", "right"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *[(family, {}) for family in ("llama", "mistral", "gemma2", "phi3", "gpt2")],
        *[(family, EAGER) for family in ("llama", "mistral", "gpt_neox")],
    ],
)
def test_trained_padding_has_the_gradient_of_the_masked_loss(family: str, options: dict[str, Any], mask: Any) -> None:
    model, batch = decoder(family, **options), trained_padding(mask)
    assert_near(step(model, batch, "exact"), plain_step(model, batch))
    assert_near(step(model, batch, "detach"), step(model, batch, "detach", execution="reference"))


@pytest.mark.parametrize(("options", "is_bool"), [({}, True), ({}, False), (EAGER, False)])
def test_a_mask_of_ones_own_may_let_positions_look_at_later_ones(options: dict[str, Any], is_bool: bool) -> None:
    model, ids = decoder("llama", **options), random_ids()
    sees_TT = torch.ones(16, 16).tril().bool()
    sees_TT[:8, :8] = True
    mask_TT = sees_TT if is_bool else torch.zeros(16, 16).masked_fill(~sees_TT, torch.finfo(torch.float32).min)
    trained = torch.zeros(3, 16, dtype=torch.bool)
    trained[:, 3] = trained[0, 5] = True
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask_TT.expand(3, 1, 16, 16)}
    batch = Batch(inputs, trained, trained)
    assert_near(step(model, batch, "exact"), plain_step(model, batch))
    assert_near(step(model, batch, "detach"), step(model, batch, "detach", execution="reference"))
