"""A tiny model, a few examples, and trainers of all three kinds over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from sparsebp_cli.trainer import PolicyCallback, PolicyTrainer

LENGTH, VOCABULARY = 12, 64
# transformers 5.23 calls it so, and warns of the name before
CHECKPOINTING = "activation_checkpointing"
if not hasattr(TrainingArguments, CHECKPOINTING):
    CHECKPOINTING = "gradient_checkpointing"


def make_model(**options: Any) -> LlamaForCausalLM:
    """The same model for every call."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **options,
        )
    )


def make_examples(number: int = 40) -> list[dict[str, Tensor]]:
    """Random tokens; the first quarter of each is not trained."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for _ in range(number):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: LENGTH // 4] = -100
        examples.append({"input_ids": ids, "labels": labels})
    return examples


def make_arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Twelve short steps on the CPU, quiet."""
    values: dict[str, Any] = {
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **(values | options))


Make = Callable[..., Any]
TRAINER, CALLBACK = DOORS = ("PolicyTrainer", "PolicyCallback")


def through(trainer: Iterable[Any], callback: Iterable[Any]) -> list[tuple[Any, str]]:
    """Pairs of a case and the door that it goes through; the callback is all that the trainer has, so a few do."""
    return [(case, TRAINER) for case in trainer] + [(case, CALLBACK) for case in callback]


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Make:
    """Make a trainer with policies, through each of the two doors: trainer class, its arguments, and the policies'."""

    def make(base: type[Trainer], policies: Any, options: dict[str, Any], **kwargs: Any) -> Any:
        if request.param == TRAINER:
            kind = type("Own", (_Between(base), PolicyTrainer), {}) if base is not Trainer else PolicyTrainer
            return kind(policies=policies, **options, **kwargs)
        trainer = base(**kwargs)
        callback = PolicyCallback(policies, **options).join(trainer)
        trainer_engine: Any = trainer
        trainer_engine.policy_callback = callback
        return trainer

    return make


def _Between(base: type[Trainer]) -> type:  # noqa: N802 - makes a class
    """What a user's own trainer adds to ``Trainer``, to be put onto ``PolicyTrainer``."""
    return type(base.__name__, (), {key: value for key, value in vars(base).items() if not key.startswith("__")})


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all weights."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def differing(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    """Names of weights that are not the same to the last bit."""
    assert one.keys() == two.keys()
    return [name for name, value in one.items() if not torch.equal(value, two[name])]


def distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """The 2-norm of the difference of all weights, relative to that of the weights."""
    squares = sum(float((value - two[name]).double().square().sum()) for name, value in one.items())
    return float((squares / sum(float(value.double().square().sum()) for value in one.values())) ** 0.5)


def is_free(trainer: Any) -> bool:
    """Whether nothing of the engine is left in a trainer's model and accelerator."""
    bound = [name for name, module in trainer.model.named_modules() if "forward" in vars(module)]
    return bound == [] and "backward" not in vars(trainer.accelerator)
