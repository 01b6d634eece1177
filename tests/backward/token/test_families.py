"""Every family, padded, packed or not: exact equals the masked loss, what is cut equals what is detached by hand."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from sparsebp_cli.policy.token import TokenMode
from tests.backward.families import DECODERS, tiny_decoder

from .case import assert_near, detaching_projections, make_batch, plain_step, step

MASKS: tuple[Any, ...] = ("none", "left", "right", "packed")
CHOICES = ("scattered", "prompts", "two")
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}


# Every family with two of the masks, and every mask with half of the families; the others are long.
PAIRS = [
    pytest.param(family, mask, marks=[pytest.mark.long] if (number + place) % 2 else [])
    for number, family in enumerate(DECODERS)
    for place, mask in enumerate(MASKS)
]


def decoder(family: str, **options: Any) -> PreTrainedModel:
    """Return a tiny decoder without dropout, with sdpa where it can."""
    options = {"attn_implementation": "eager" if family == "gemma2" else "sdpa"} | options
    return tiny_decoder(family, **((NO_DROPOUT if family in ("gpt2", "phi") else {}) | options))


@pytest.mark.parametrize(("family", "mask"), PAIRS)
def test_exact_has_the_gradient_of_the_masked_loss(family: str, mask: Any) -> None:
    model = decoder(family)
    for name in CHOICES:
        batch = make_batch(name, mask)
        assert_near(step(model, batch, "exact"), plain_step(model, batch))


@pytest.mark.parametrize(("family", "mask"), PAIRS)
def test_what_is_cut_equals_its_reference(family: str, mask: Any) -> None:
    model = decoder(family)
    for name in CHOICES:
        batch = make_batch(name, mask)
        assert_near(step(model, batch, "detach"), step(model, batch, "detach", execution="reference"))


@pytest.mark.parametrize("mode", ["exact", "detach"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_neox"])
def test_eager_attention_equals_the_reference(family: str, mask: Any, mode: TokenMode) -> None:
    model = decoder(family, attn_implementation="eager")
    for name in ("scattered", "prompt"):
        batch = make_batch(name, mask)
        assert_near(step(model, batch, mode), step(model, batch, mode, execution="reference"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi"])
def test_the_reference_detaches_what_the_projections_give(family: str) -> None:
    model = decoder(family)
    for name in ("scattered", "prompt", "half"):
        batch = make_batch(name)
        reference = step(model, batch, "detach", execution="reference")
        handles = detaching_projections(model, batch.carries)
        by_hand = plain_step(model, batch)
        for handle in handles:
            handle.remove()
        assert_near(reference, by_hand, 1e-6)
        assert_near(step(model, batch, "detach"), by_hand)


def test_an_attention_that_clips_in_place_is_right() -> None:
    model = decoder("olmo", clip_qkv=0.01)
    for name in ("scattered", "two"):
        batch = make_batch(name)
        assert_near(step(model, batch, "exact"), plain_step(model, batch))
        assert_near(step(model, batch, "detach"), step(model, batch, "detach", execution="reference"))


def test_detach_is_another_gradient_than_exact() -> None:
    model, batch = decoder("llama"), make_batch("scattered")
    exact, detach = step(model, batch, "exact"), step(model, batch, "detach")
    assert exact.loss.allclose(detach.loss, rtol=1e-6)
    name = "model.layers.0.self_attn.v_proj.weight"
    ours, theirs = detach.gradients[name], exact.gradients[name]
    assert ours is not None
    assert theirs is not None
    assert float((ours - theirs).norm() / theirs.norm()) > 0.1
