"""Models with pictures: batches of text are packed, those with pictures are computed whole."""

from __future__ import annotations

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError
from tests.backward.token.test_refusals import pictured

from .case import SOME, errors, gradients, make_batch
from .test_sequence import SIZES

IMAGE = 63  # the token of a picture, of which 16 x 16 pixels have four


def make_model() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = LlavaConfig(text_config=LlamaConfig(**SIZES), vision_config=vision, image_token_index=IMAGE)
    model: LlavaForConditionalGeneration = LlavaForConditionalGeneration(config).train()
    return model


def test_batches_of_text_have_the_gradient_of_the_plain_step() -> None:
    assert errors(make_model(), SOME) == {}


def test_a_batch_with_pictures_between_batches_of_text_is_the_plain_step() -> None:
    model, text, both = make_model(), make_batch("right", "completion", "groups"), make_batch("right", "last", "none")
    both["input_ids"][:, 3:7] = IMAGE
    both["pixel_values"] = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    loss, expected = gradients(model, None, both)
    with sbp.attach(model, "lossless") as engine:
        gradients(model, engine, text)
        own, grads = gradients(model, engine, both)
        gradients(model, engine, text)
        note = engine.notes["packing"]
    assert torch.equal(loss, own)
    assert all(torch.equal(one, other) for one, other in zip(expected, grads, strict=True))
    assert "in 2 of 3 batches" in note
    assert "1 batches ran without lossless: they have pixel_values" in note


def test_an_argument_that_is_no_picture_is_refused_before_the_training() -> None:
    model, batch = make_model(), make_batch("right", "last", "none")
    with sbp.attach(model, "lossless") as engine:
        engine.check_arguments(batch | {"pixel_values": torch.zeros(1)})
        with pytest.raises(UnsupportedError, match="vision_feature_layer in training: leave it out of the batch"):
            engine.check_arguments(batch | {"vision_feature_layer": -1})


def test_a_model_that_reads_the_attention_mask_is_refused_with_a_way_out() -> None:
    model, batch = pictured().train(), make_batch("right", "completion", "groups")
    text = "lossless does not support this model, which reads ndim of the attention mask"
    with sbp.attach(model, "lossless") as engine, pytest.raises(UnsupportedError, match=text):
        gradients(model, engine, batch)
