"""Trainings as people write them: trainers, collators and loops, each for one or two steps on a tiny model.

``benchmarks/mixing.py`` runs all of them for the models of the page; the tests run some.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import sparsebp_audit
from sparsebp_audit.report import IsolationReport
from tests.trainer.test_trl import OPTIONS, VOCABULARY, make_tokenizer, reward, texts

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")} | {
    f"linear_{kind}_head_dim": 8 for kind in ("key", "value")
}
# By the type of its configuration: what else makes it tiny. Layer types are those of published models.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "gpt2": {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_5_text": LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_dim": 32, "block_dim": 32, "block_ff_dim": 48},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16, "expand": 2},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
}
SEVERAL = 4


def make_model(kind: str, auto: Any = AutoModelForCausalLM, **own: Any) -> PreTrainedModel:
    """A tiny model with weights so large that what is mixed shows."""
    config = AutoConfig.for_model(kind)
    text = config.get_text_config()
    for name, value in (SMALL | MODELS.get(kind, {}) | own).items():
        if hasattr(text, name) or name == "pad_token_id":
            setattr(text, name, value)
    torch.manual_seed(0)
    model: PreTrainedModel = auto.from_config(text)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def examples() -> list[dict[str, list[int]]]:
    """Examples of random tokens and of unlike lengths."""
    tokenizer = make_tokenizer()
    return [{"input_ids": tokenizer(text)["input_ids"]} for text in texts(16, 24, 1)]


def judge(train: Callable[[], Any]) -> IsolationReport:
    """Run a training under the audit."""
    report = sparsebp_audit.audit(train, examples=True).examples
    assert report is not None
    return report


def run_trainer(
    model: PreTrainedModel, collator: Any, folder: Path, data: Any = None, **options: Any
) -> IsolationReport:
    """One step of transformers' Trainer."""
    arguments = TrainingArguments(
        str(folder),
        **(
            {
                "per_device_train_batch_size": SEVERAL,
                "max_steps": 1,
                "use_cpu": True,
                "report_to": [],
                "save_strategy": "no",
                "disable_tqdm": True,
                "remove_unused_columns": False,
            }
            | options
        ),
    )
    trainer = Trainer(model=model, args=arguments, data_collator=collator, train_dataset=data or examples())
    return judge(trainer.train)


def classify(kind: str, folder: Path) -> IsolationReport:
    """Trainer with DataCollatorWithPadding."""
    data = [example | {"label": number % 2} for number, example in enumerate(examples())]
    model = make_model(kind, AutoModelForSequenceClassification)
    return run_trainer(model, DataCollatorWithPadding(make_tokenizer()), folder, data)


def language(kind: str, folder: Path, side: str = "right") -> IsolationReport:
    """Trainer with DataCollatorForLanguageModeling."""
    tokenizer = make_tokenizer()
    tokenizer.padding_side = side
    return run_trainer(make_model(kind), DataCollatorForLanguageModeling(tokenizer, mlm=False), folder)


def language_left(kind: str, folder: Path) -> IsolationReport:
    """The same with padding on the left."""
    return language(kind, folder, "left")


def labelled(kind: str, folder: Path) -> IsolationReport:
    """Trainer with DataCollatorForSeq2Seq, whose labels are padded as well."""
    data = [example | {"labels": example["input_ids"]} for example in examples()]
    return run_trainer(make_model(kind), DataCollatorForSeq2Seq(make_tokenizer()), folder, data)


def flattened(kind: str, folder: Path, **options: Any) -> IsolationReport:
    """Trainer with DataCollatorWithFlattening."""
    return run_trainer(make_model(kind), DataCollatorWithFlattening(), folder, **options)


def flattened_loop(kind: str, folder: Path) -> IsolationReport:
    """A loop of one's own with DataCollatorWithFlattening."""
    model = make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def train() -> None:
        model(**DataCollatorWithFlattening()(examples()[:SEVERAL])).loss.backward()
        optimizer.step()

    return judge(train)


def accumulated(kind: str, folder: Path) -> IsolationReport:
    """Trainer with accumulation, which passes num_items_in_batch."""
    data = [example | {"labels": example["input_ids"]} for example in examples()]
    collator = DataCollatorForSeq2Seq(make_tokenizer())
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return run_trainer(make_model(kind), collator, folder, data, **options)


def accumulated_loop(kind: str, folder: Path) -> IsolationReport:
    """A loop of one's own with accumulation over the mean losses of micro-batches."""
    model = make_model(kind)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def train() -> None:
        for example in examples()[:SEVERAL]:
            ids = torch.tensor([example["input_ids"]])
            (model(input_ids=ids, labels=ids, use_cache=False).loss / SEVERAL).backward()
        optimizer.step()

    return judge(train)


def sft(kind: str, folder: Path, **options: Any) -> IsolationReport:
    """TRL's SFTTrainer, padded."""
    trainer = SFTTrainer(
        make_model(kind),
        SFTConfig(str(folder), **(OPTIONS | {"max_steps": 1} | options)),
        train_dataset=Dataset.from_list(examples()),
        processing_class=make_tokenizer(),
    )
    return judge(trainer.train)


def sft_free(kind: str, folder: Path) -> IsolationReport:
    """The same with padding_free=True."""
    return sft(kind, folder, padding_free=True, max_length=None)


def sft_packed(kind: str, folder: Path) -> IsolationReport:
    """The same with packing=True."""
    return sft(kind, folder, packing=True, max_length=64)


def dpo(kind: str, folder: Path) -> IsolationReport:
    """TRL's DPOTrainer."""
    answers = {"chosen": texts(16, 16, 2), "rejected": texts(16, 16, 3)}
    trainer = DPOTrainer(
        make_model(kind),
        make_model(kind),
        DPOConfig(str(folder), **(OPTIONS | {"max_steps": 1})),
        train_dataset=Dataset.from_dict({"prompt": texts(16, 24, 1), **answers}),
        processing_class=make_tokenizer(),
    )
    return judge(trainer.train)


def grpo(kind: str, folder: Path) -> IsolationReport:
    """TRL's GRPOTrainer."""
    own = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "max_steps": 1}
    trainer = GRPOTrainer(
        make_model(kind),
        reward,
        GRPOConfig(str(folder), **(OPTIONS | own)),
        train_dataset=Dataset.from_dict({"prompt": texts(16, 24, 1)}),
        processing_class=make_tokenizer(),
    )
    return judge(trainer.train)


def translate(kind: str, folder: Path) -> IsolationReport:
    """Trainer with DataCollatorForSeq2Seq and an encoder with a decoder."""
    own = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "decoder_start_token_id": 0}
    model = make_model(kind, AutoModelForSeq2SeqLM, **own)
    data = [example | {"labels": example["input_ids"][:9]} for example in examples()]
    return run_trainer(model, DataCollatorForSeq2Seq(make_tokenizer(), model=model), folder, data)


# By the words of the page's table.
WAYS: dict[str, Callable[[str, Path], IsolationReport]] = {
    "Trainer, DataCollatorWithPadding (classification)": classify,
    "Trainer, DataCollatorForLanguageModeling": language,
    "Trainer, the same, padding on the left": language_left,
    "Trainer, DataCollatorForSeq2Seq": labelled,
    "Trainer, DataCollatorWithFlattening": flattened,
    "own loop, DataCollatorWithFlattening": flattened_loop,
    "Trainer, accumulation": accumulated,
    "own loop, accumulated mean losses": accumulated_loop,
    "TRL SFT": sft,
    "TRL SFT, padding_free": sft_free,
    "TRL SFT, packing": sft_packed,
    "TRL DPO": dpo,
    "TRL GRPO": grpo,
}
