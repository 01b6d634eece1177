"""Trained prompts of peft before every example are one shared segment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError

from .case import SOME, error, errors, gradients, make_batch
from .test_sequence import SIZES

# peft 0.21 asks transformers 5.23 by its old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
VIRTUAL = 20


def make_model(config: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), config)
    return model.train()


def tuning() -> Any:
    return PromptTuningConfig(num_virtual_tokens=VIRTUAL, task_type="CAUSAL_LM")


def encoder() -> Any:
    return PromptEncoderConfig(num_virtual_tokens=VIRTUAL, task_type="CAUSAL_LM", encoder_hidden_size=16)


@pytest.mark.parametrize("config", [tuning, encoder])
@pytest.mark.parametrize("verify", ["never", "first"])
def test_a_prompt_has_the_gradient_of_the_plain_step(config: Any, verify: str) -> None:
    assert errors(make_model(config()), SOME, verify=verify) == {}


def test_a_prompt_and_the_text_that_follows_it_in_a_group_are_computed_once() -> None:
    model, batch = make_model(tuning()), make_batch("right", "completion", "groups")
    with sbp.attach(model, "lossless") as engine:
        gradients(model, engine, batch)
        assert f"{5 * (VIRTUAL + 20)} in a shared prefix" in engine.notes["packing"]
        assert "gradient compared with the ordinary one in 1 of these" in engine.notes["packing"]
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_prompt_is_shared_by_texts_that_have_nothing_in_common() -> None:
    model, batch = make_model(tuning()), make_batch("none", "completion", "none")
    with sbp.attach(model, "lossless") as engine:
        gradients(model, engine, batch)
        assert f"{5 * VIRTUAL} in a shared prefix" in engine.notes["packing"]


def test_prompts_that_differ_between_examples_are_not_shared() -> None:
    model: Any = make_model(tuning())
    own = model.get_prompt

    def get_prompt(batch_size: int, **options: Any) -> Tensor:
        prompt: Tensor = own(batch_size, **options)
        return prompt * (1 + torch.arange(batch_size)[:, None, None])

    model.get_prompt = get_prompt
    batch = make_batch("none", "completion", "groups")
    loss, expected = gradients(model, None, batch)
    with sbp.attach(model, "lossless") as engine:
        found, grads = gradients(model, engine, batch)
        assert " 0 in a shared prefix" in engine.notes["packing"]
    assert error(expected, grads) < 1e-6
    assert float(found) == pytest.approx(float(loss), rel=1e-6)


def test_a_prefix_of_keys_and_values_is_refused_at_attach_with_a_way_out() -> None:
    model = make_model(PrefixTuningConfig(num_virtual_tokens=VIRTUAL, task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedError, match=r"PREFIX_TUNING.*PromptTuningConfig.*or LoRA instead"):
        sbp.attach(model, "lossless")
