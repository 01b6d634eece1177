"""A policy that chooses tokens or examples is asked in the model's forward, and says so where nothing passes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.policy import Policy

from .case import random_ids
from .test_families import decoder

# peft 0.21 asks transformers 5.23 by its old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TOKENS: dict[str, Any] = {"score": "random", "keep": 0.5}
CHOOSING = [
    sbp.make_policy("tokens", **TOKENS),
    sbp.make_policy("tokens", **TOKENS, mode="detach"),
    sbp.make_policy("uniform", keep=0.5, start=0.0, end=1.0),
]
ids = pytest.mark.parametrize("policy", CHOOSING, ids=["exact", "detach", "examples"])


@ids
def test_a_loss_that_goes_past_the_forward_is_refused(policy: Policy) -> None:
    class Valued(nn.Module):
        """A value head over the decoder's hidden states."""

        def __init__(self) -> None:
            super().__init__()
            self.lm, self.value = decoder("llama"), nn.Linear(32, 1)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.value(self.lm.model(input_ids=input_ids).last_hidden_state).mean()

    model = Valued()
    with sbp.attach(model, [policy]) as engine:
        loss = model(random_ids())
        with pytest.raises(UsageError, match=r"was not called: no training forward of LlamaForCausalLM"):
            engine.backward(loss)
        assert all(parameter.grad is None for parameter in model.parameters())
        with engine.disabled():
            engine.backward(model(random_ids()))
        with pytest.raises(UsageError, match="was not called"):
            engine.backward(model(random_ids()))
        engine.backward(model.lm(input_ids=random_ids(), labels=random_ids()).loss)


@ids
def test_a_model_in_eval_mode_is_refused_with_the_call_that_helps(policy: Policy) -> None:
    model = decoder("llama").eval()
    with sbp.attach(model, [policy]) as engine:
        with pytest.raises(UsageError, match=r"LlamaForCausalLM is in eval mode.* call model\.train\(\)"):
            engine.backward(model(input_ids=random_ids(), labels=random_ids()).loss)
        model.train()
        engine.backward(model(input_ids=random_ids(), labels=random_ids()).loss)


def test_a_wrapper_that_kept_the_forward_goes_past_and_is_refused() -> None:
    model = get_peft_model(
        decoder("llama"), AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2)
    )
    with sbp.attach(model, [CHOOSING[-1]]) as engine, pytest.raises(UsageError, match="Uniform was not called"):
        engine.backward(model(input_ids=random_ids(), labels=random_ids()).loss)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PromptEncoderConfig])
def test_a_prompt_that_no_gradient_would_reach_is_refused_and_else_trained(kind: type[PeftConfig]) -> None:
    model = get_peft_model(decoder("llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(
        UnsupportedError,
        match=r"computes no gradient for the soft prompt .* of PeftModelForCausalLM.*set 'mode: exact'",
    ):
        sbp.attach(model, [CHOOSING[1]])
    found = []
    for engine in ("fast", "reference"):
        model.zero_grad(set_to_none=True)
        with sbp.attach(model, [CHOOSING[0]], execution=engine) as attached:
            attached.backward(model(input_ids=random_ids(), labels=random_ids()).loss)
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    for one, other in zip(*found, strict=True):
        assert one.norm() > 0.0
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@ids
def test_keys_and_values_that_were_learned_beforehand_are_refused(policy: Policy) -> None:
    model = get_peft_model(decoder("llama"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with (
        pytest.raises(
            UnsupportedError,
            match=r"a filled cache of earlier positions|(cache|past_key_values) in training|"
            r"the soft prompt .* of PeftModelForCausalLM",
        ),
        sbp.attach(model, [policy]),
    ):
        model(input_ids=random_ids(), labels=random_ids())
