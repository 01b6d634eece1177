"""Attentions whose cache holds latents: what expands them has the gradient of rows that carry one alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.backward.conftest import VOCABULARY

from .case import Marked, assert_near, make_batch, step
from .definition import step_by_definition
from .test_joined import unequal
from .test_work import even, prove

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}


def latent(**options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model("deepseek_v3", **(SIZES | options))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.train()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_latents_of_chosen_rows_are_expanded_as_the_mode_says(attention: str) -> None:
    model = latent(attn_implementation=attention)
    for batch in (make_batch("scattered", "left"), unequal()):
        expected = step(model, batch, "detach", execution="reference")
        assert_near(step(model, batch, "detach"), expected)
        if attention == "sdpa":
            assert_near(step_by_definition(model, batch, "detach"), expected)


@pytest.mark.parametrize("mode", ["exact", "detach"])
def test_a_checkpointed_layer_expands_latents_to_the_same_gradient(mode: Any) -> None:
    model = latent()
    stored = step(model, unequal(), mode)
    checkpoint_activations(model)
    assert_near(step(model, unequal(), mode), stored, 1e-6)


@pytest.mark.parametrize("mode", ["exact", "detach"])
@pytest.mark.parametrize("kind", ["prompt", "scattered"])
def test_what_expands_latents_executes_what_was_claimed(kind: str, mode: Any) -> None:
    proof = prove(latent(), even(kind), Marked(mode=mode))
    executed = proof.policy.flops
    assert sum(executed.forward.values()) == pytest.approx(proof.claimed_forward_flops, rel=1e-12)
    assert proof.claimed_flops == pytest.approx(executed.backward.total(), rel=1e-12)
    assert proof.excess_share == 0.0
