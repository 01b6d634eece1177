"""The policy ``lossless`` in a trainer: the losses and weights of ``Trainer``, up to rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError

from .conftest import (
    CHECKPOINTING,
    TRAINER,
    VOCABULARY,
    Make,
    differing,
    distance,
    is_free,
    make_arguments,
    make_model,
    through,
    weights,
)
from .test_same import OwnLoss, own_loss_func

# peft 0.21 asks transformers 5.23 by its old name
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.xdist_group("plain trainings"),
]
HEADER, LONGEST, IGNORED = 20, 40, -100
NO_REENTRANT = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}}


def make_examples(number: int = 32, *, header: bool = False) -> list[dict[str, Tensor]]:
    """Completions of different lengths after prompts, with one header before all of them if wanted."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(3, VOCABULARY, (HEADER,), generator=generator)
    examples = []
    for length in torch.randint(LONGEST // 2, LONGEST, (number,), generator=generator).tolist():
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 2] = IGNORED
        if header:
            ids, labels = torch.cat((first, ids)), torch.cat((torch.full_like(first, IGNORED), labels))
        examples.append({"input_ids": ids, "labels": labels})
    return examples


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Right padding."""
    pad = nn.utils.rnn.pad_sequence
    ids = pad([example["input_ids"] for example in examples], batch_first=True)
    labels = pad([example["labels"] for example in examples], batch_first=True, padding_value=IGNORED)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": labels}


def lora(model: LlamaForCausalLM) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0))


CASES: dict[str, dict[str, Any]] = {
    "padding": {"header": False},
    "header": {},
    "accumulation and clipping": {"args": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}},
    "bf16": {"args": {"bf16": True, "optim": "sgd", "learning_rate": 0.1}},
    "checkpointing": {"args": NO_REENTRANT},
    "label smoothing": {"args": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}},
    "lora, bf16, checkpointing": {
        "wrap": lora,
        "args": {"bf16": True, "optim": "sgd", "learning_rate": 1.0, **NO_REENTRANT},
    },
    "lora": {"wrap": lora, "args": {"gradient_accumulation_steps": 2}},
    "own loss": {"base": OwnLoss},
    "loss function": {"kwargs": {"compute_loss_func": own_loss_func}, "args": {"gradient_accumulation_steps": 2}},
    "epochs that do not divide": {"args": {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3}},
    "evaluation": {"args": {"eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}},
}


def build(case: dict[str, Any], folder: Path) -> tuple[type[Trainer], dict[str, Any]]:
    header = case.get("header", True)
    kwargs = {
        "model": case.get("wrap", lambda same: same)(make_model()),
        "args": make_arguments(folder, **({"per_device_train_batch_size": 4} | case.get("args", {}))),
        "train_dataset": make_examples(header=header),
        "eval_dataset": make_examples(4, header=header),
        "data_collator": collate,
    }
    return case.get("base", Trainer), kwargs | case.get("kwargs", {})


def losses_of(trainer: Any) -> list[float]:
    """What both log."""
    return [log[key] for log in trainer.state.log_history for key in ("loss", "eval_loss") if key in log]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Tensor], list[float], float]]:
    """Weights, losses and the distance from the first weights of ``Trainer``, by case."""

    @functools.cache
    def train(name: str) -> tuple[dict[str, Tensor], list[float], float]:
        base, kwargs = build(CASES[name], tmp_path_factory.mktemp("plain"))
        trainer = base(**kwargs)
        before = weights(trainer.model)
        trainer.train()
        return weights(trainer.model), losses_of(trainer), distance(before, weights(trainer.model))

    return train


@pytest.mark.always(
    "lora, bf16, checkpointing-PolicyCallback",
    "own loss-PolicyTrainer",
    "label smoothing-PolicyTrainer",
    "epochs that do not divide-PolicyTrainer",
    "padding-PolicyTrainer",
)
@pytest.mark.parametrize(("name", "door"), through(CASES, ("lora, bf16, checkpointing", "own loss")), indirect=["door"])
def test_lossless_trains_the_losses_and_weights_of_trainer(
    name: str, door: Make, tmp_path: Path, plain: Callable[[str], tuple[dict[str, Tensor], list[float], float]]
) -> None:
    base, kwargs = build(CASES[name], tmp_path)
    trainer = door(base, "lossless", {}, **kwargs)
    trainer.train()
    trained, losses, way = plain(name)
    assert distance(trained, weights(trainer.model)) < way * (2e-2 if "bf16" in name else 1e-4)
    assert losses_of(trainer) == pytest.approx(losses, rel=1e-3 if "bf16" in name else 1e-5)
    note = trainer.policy_callback.engine.notes["packing"]
    assert "gradient compared with the ordinary one" in note
    assert (" 0 in a shared prefix" in note) == (name == "padding")
    assert is_free(trainer) or "bf16" in name  # there accelerate leaves its own forward


def test_the_first_count_is_that_of_a_step_without_the_comparison(tmp_path: Path) -> None:
    trainer = sbp.PolicyTrainer(policies="lossless", **build(CASES["padding"], tmp_path)[1])
    trainer.train()
    log = next(log for log in trainer.state.log_history if "flops/backward_executed" in log)
    assert log["flops/backward_executed"] < log["flops/backward_dense"]
    assert log["flops/forward"] < log["flops/backward_dense"]


def test_a_resumed_training_ends_with_the_same_weights(tmp_path: Path) -> None:
    def build_one(folder: Path) -> Any:
        options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        return sbp.PolicyTrainer(policies="lossless", **build({"args": options}, folder)[1])

    whole, resumed = build_one(tmp_path), build_one(tmp_path / "again")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert differing(weights(whole.model), weights(resumed.model)) == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"torch_compile": True}, "Lossless.* is not supported with torch_compile"),
        (
            {"neftune_noise_alpha": 5.0},
            "Lossless.* is not supported with neftune_noise_alpha=5.0: the noise depends",
        ),
    ],
)
def test_what_depends_on_the_arrangement_is_refused(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    _, kwargs = build({"args": options}, tmp_path)
    with pytest.raises(UnsupportedError, match=match):
        sbp.PolicyTrainer(policies="lossless", **kwargs)


class Weighted(Trainer):
    """A loss of the trainer's own beside the model's."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("door", [TRAINER], indirect=True)
def test_a_loss_of_logits_beside_labels_is_refused(door: Make, tmp_path: Path) -> None:
    _, kwargs = build({}, tmp_path)
    trainer = door(Weighted, "lossless", {"log_flops_every": None}, **kwargs)
    with pytest.raises(UnsupportedError, match="leave the labels out of the forward"):
        trainer.train()
    assert is_free(trainer)
