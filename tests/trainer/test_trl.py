"""The policy ``lossless`` in trainers of trl: the losses and weights of the same training without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import sparsebp_cli as sbp

from .conftest import CHECKPOINTING, VOCABULARY, distance, make_model, weights

pytestmark = pytest.mark.filterwarnings("ignore")  # trl warns of its own defaults, and transformers of trl's
NUM_STEPS, PROMPT = 20, 24
WORDS = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCABULARY))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def texts(number: int, longest: int, seed: int) -> list[str]:
    """Random words; half of the longest, or more."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest // 2, longest + 1, (number,), generator=generator)
    tokens = [torch.randint(3, VOCABULARY, (int(length),), generator=generator) for length in lengths]
    return ["".join(f"{WORDS[token]} " for token in some) for some in tokens]


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")


OPTIONS: dict[str, Any] = {
    "max_steps": NUM_STEPS,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    CHECKPOINTING: False,
}


def sft(folder: Path, model: PreTrainedModel, peft_config: Any = None, **options: Any) -> Any:
    """Answers after prompts, padded; only the answers are trained."""
    data = {"prompt": texts(32, PROMPT, 1), "completion": texts(32, 16, 2)}
    return SFTTrainer(
        model,
        SFTConfig(str(folder), completion_only_loss=True, **(OPTIONS | options)),
        train_dataset=Dataset.from_dict(data),
        eval_dataset=Dataset.from_dict({name: column[:6] for name, column in data.items()}),
        processing_class=make_tokenizer(),
        peft_config=peft_config,
    )


def experts(folder: Path, _: LlamaForCausalLM, **options: Any) -> Any:
    """The same for a mixture of experts, whose balance is a part of the loss; SFTTrainer asks for that by itself."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.1,
    )
    return sft(folder, Qwen3MoeForCausalLM(config), **options)


def dpo(folder: Path, model: LlamaForCausalLM, peft_config: Any = None, **options: Any) -> Any:
    """Pairs of answers to one prompt."""
    answers = {"chosen": texts(32, 16, 2), "rejected": texts(32, 16, 3)}
    return DPOTrainer(
        model,
        None if peft_config else make_model(max_position_embeddings=128),
        DPOConfig(str(folder), **(OPTIONS | options)),
        train_dataset=Dataset.from_dict({"prompt": texts(32, 2 * PROMPT, 1), **answers}),
        processing_class=make_tokenizer(),
        peft_config=peft_config,
    )


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Even tokens are good."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def grpo(folder: Path, model: LlamaForCausalLM, peft_config: Any = None, **options: Any) -> Any:
    """Groups of four answers to one prompt, which the model writes during training."""
    own = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
    if options.get("beta"):  # the reference is loaded by the model's name
        model.save_pretrained(folder / "model")
        model.config._name_or_path = str(folder / "model")
    return GRPOTrainer(
        model,
        reward,
        GRPOConfig(str(folder), **(OPTIONS | own | options)),
        train_dataset=Dataset.from_dict({"prompt": texts(32, 2 * PROMPT, 1)}),
        processing_class=make_tokenizer(),
        peft_config=peft_config,
    )


def train(
    make: Callable[..., Any], folder: Path, policies: Any, **options: Any
) -> tuple[dict[str, Tensor], list[dict[str, float]], Any]:
    """Return the trained weights, the log and the engine."""
    torch.manual_seed(0)
    trainer = make(folder, make_model(max_position_embeddings=128), **options)
    callback = sbp.PolicyCallback(policies).join(trainer) if policies else None
    trainer.train()
    return weights(trainer.model), trainer.state.log_history, callback and callback.engine


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "SFT": (sft, {"eval_strategy": "steps", "eval_steps": 10}),
    "SFT, accumulation": (sft, {"gradient_accumulation_steps": 2}),
    "SFT, lora, checkpointing": (sft, {"peft_config": lora, CHECKPOINTING: True}),
    "SFT, bf16": (sft, {"bf16": True, "optim": "sgd", "learning_rate": 0.1}),
    "SFT, packing": (sft, {"packing": True, "max_length": 64, "eval_strategy": "steps", "eval_steps": 10}),
    "SFT, padding-free": (sft, {"padding_free": True, "max_length": None, "pad_to_multiple_of": 16}),
    "SFT, experts": (experts, {"eval_strategy": "steps", "eval_steps": 10}),
    "SFT, experts, packing": (experts, {"packing": True, "max_length": 64, "gradient_accumulation_steps": 2}),
    "DPO": (dpo, {}),
    "DPO, lora": (dpo, {"peft_config": lora}),
    "GRPO": (grpo, {}),
    "GRPO, reference": (grpo, {"beta": 0.1}),
    "GRPO, accumulation, iterations": (grpo, {"gradient_accumulation_steps": 2, "num_iterations": 2}),
}
LOGGED = (
    *("loss", "eval_loss", "num_tokens", "entropy", "mean_token_accuracy", "grad_norm", "learning_rate"),
    *("kl", "aux_loss"),
    *("reward", "reward_std", "frac_reward_zero_std", "clip_ratio/region_mean", "completions/mean_length"),
    *("rewards/margins", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected"),
)


@pytest.mark.always(
    "SFT", "SFT, packing", "SFT, experts", "SFT, lora, checkpointing", "DPO", "GRPO, accumulation, iterations"
)
@pytest.mark.parametrize("name", CASES)
def test_lossless_trains_the_losses_and_weights_of_the_trainer(name: str, tmp_path: Path) -> None:
    make, options = CASES[name]
    options = {key: value() if key == "peft_config" else value for key, value in options.items()}
    expected, log, _ = train(make, tmp_path / "plain", None, **options)
    found, own, engine = train(make, tmp_path / "lossless", "lossless", **options)
    limit = 1e-3 if "bf16" in name else 1e-5
    assert distance(expected, found) < limit
    assert len(own) == len(log)
    for one, other in zip(log, own, strict=True):
        wanted = {key: one[key] for key in LOGGED if key in one}
        assert {key: other[key] for key in wanted} == pytest.approx(wanted, rel=10 * limit, abs=limit)
    note = engine.notes["packing"]
    assert "gradient compared with the ordinary one" in note
    assert (" 0 in a shared prefix" in note) == name.startswith("SFT")


def answers(folder: Path, model: PreTrainedModel, **options: Any) -> Any:
    """Four answers to each prompt, of which a micro-batch has two."""
    data = {"prompt": [text for text in texts(8, PROMPT, 1) for _ in range(4)], "completion": texts(32, 16, 2)}
    own = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_steps": 6}
    return SFTTrainer(
        model,
        SFTConfig(str(folder), completion_only_loss=True, **(OPTIONS | own | options)),
        train_dataset=Dataset.from_dict(data),
        processing_class=make_tokenizer(),
    )


def test_prefixes_of_an_update_are_shared_in_trls_trainer(tmp_path: Path) -> None:
    expected, log, _ = train(answers, tmp_path / "plain", None)
    found, own, engine = train(answers, tmp_path / "update", sbp.make_policy("lossless", prefixes="update"))
    assert distance(expected, found) < 1e-5
    for one, other in zip(log, own, strict=True):
        wanted = {key: one[key] for key in LOGGED if key in one}
        assert {key: other[key] for key in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    note = engine.notes["packing of updates"]
    assert "sharing prefixes skipped" in note
    assert "ran without shared prefixes" not in note
