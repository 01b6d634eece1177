"""Policies that choose tokens and examples, in the loss that the model computes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from sparsebp_cli.errors import UsageError

from .conftest import TRAINER, Make, differing, is_free, make_arguments, make_examples, make_model, through, weights


@pytest.mark.always("1-PolicyTrainer")
@pytest.mark.parametrize(("accumulation", "door"), through([1, 2], [2]), indirect=["door"])
def test_a_column_of_the_data_trains_as_labels_without_the_others_would(
    accumulation: int, door: Make, tmp_path: Path
) -> None:
    examples = make_examples(16)
    for number, example in enumerate(examples):
        example["marked"] = torch.arange(len(example["labels"])).gt(3 + number % 8).long()
    args = make_arguments(
        tmp_path, max_steps=4, remove_unused_columns=False, gradient_accumulation_steps=accumulation, optim="sgd"
    )
    policy = {"name": "tokens", "score": "mask", "mask_column": "marked"}
    trainer = door(Trainer, [policy], {}, model=make_model(), args=args, train_dataset=examples)
    trainer.train()
    assert is_free(trainer)

    labels = [example["labels"].masked_fill(example["marked"] == 0, -100) for example in examples]
    masked = [{"input_ids": example["input_ids"], "labels": own} for example, own in zip(examples, labels, strict=True)]
    plain = Trainer(model=make_model(), args=args, train_dataset=masked)
    plain.train()
    found, wanted = weights(trainer.model), weights(plain.model)
    assert max((found[name] - wanted[name]).abs().max().item() for name in wanted) < 1e-6
    assert differing(wanted, weights(make_model()))


@pytest.mark.parametrize("door", [TRAINER], indirect=True)
def test_a_column_that_the_trainer_removes_is_missed_by_name(door: Make, tmp_path: Path) -> None:
    examples = [{**example, "marked": example["labels"].ne(-100).long()} for example in make_examples(4)]
    policy = {"name": "tokens", "score": "mask", "mask_column": "marked"}
    trainer = door(Trainer, [policy], {}, model=make_model(), args=make_arguments(tmp_path), train_dataset=examples)
    with pytest.raises(
        UsageError, match=r"column 'marked', which the batch does not have: .*remove_unused_columns=False"
    ):
        trainer.train()
    assert is_free(trainer)


@pytest.mark.parametrize("mode", ["exact", "detach"])
@pytest.mark.parametrize("door", [TRAINER], indirect=True)
def test_a_step_without_a_target_leaves_the_weights_numbers(mode: str, door: Make, tmp_path: Path) -> None:
    examples = [{**example, "labels": torch.full_like(example["labels"], -100)} for example in make_examples(8)]
    args = make_arguments(tmp_path, max_steps=2, gradient_accumulation_steps=2, optim="sgd")
    policy = {"name": "tokens", "score": "loss", "keep": 0.5, "mode": mode}
    trainer = door(Trainer, [policy], {}, model=make_model(), args=args, train_dataset=examples)
    trainer.train()
    assert differing(weights(make_model()), weights(trainer.model)) == []


@pytest.mark.parametrize("door", [TRAINER], indirect=True)
def test_a_reference_model_can_be_handed_in(door: Make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = make_model()
    with torch.no_grad():
        reference.lm_head.weight.mul_(3.0)
    policy = {"name": "tokens", "score": "excess", "keep": 0.25, "reference": "handed in", "mode": "detach"}

    def train(options: Any, policy: Any = policy) -> Any:
        trainer = door(
            Trainer,
            [policy],
            options,
            model=make_model(),
            args=make_arguments(tmp_path, max_steps=3, logging_steps=1),
            train_dataset=make_examples(8),
        )
        trainer.train()
        return trainer

    trainer = train({"reference": reference})
    trained = [log["policy/trained_share"] for log in trainer.state.log_history]
    assert trained == pytest.approx([0.25] * 4, abs=0.05)
    kept = [log["policy/kept_share"] for log in trainer.state.log_history]
    assert kept == pytest.approx([log["policy/carried_share"] for log in trainer.state.log_history], abs=0.05)
    seconds = [log["time/scoring_seconds"] for log in trainer.state.log_history]
    assert seconds[3] == pytest.approx(sum(seconds[:3]) / 3)
    assert all("policy/carried_share" in log for log in trainer.state.log_history)
    by_loss = train({}, {**policy, "score": "loss", "reference": None})
    assert differing(weights(trainer.model), weights(by_loss.model))  # the reference is asked


@pytest.mark.parametrize("door", [TRAINER], indirect=True)
def test_examples_are_chosen(door: Make, tmp_path: Path) -> None:
    trainer = door(
        Trainer,
        [{"name": "uniform", "keep": 0.5, "start": 0.0, "end": 1.0, "interrupt": 0}],
        {"log_flops_every": 1},
        model=make_model(),
        args=make_arguments(tmp_path, max_steps=3, logging_steps=1, per_device_train_batch_size=4, bf16=True),
        train_dataset=make_examples(12),
    )
    trainer.train()
    assert [log["policy/kept_share"] for log in trainer.state.log_history] == pytest.approx([0.5] * 4)
