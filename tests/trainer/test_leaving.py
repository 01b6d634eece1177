"""However a training ends, trainer and model are as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

import sparsebp_cli as sbp
from sparsebp_cli.errors import UsageError

from .conftest import CALLBACK, Make, differing, is_free, make_arguments, make_examples, make_model, weights

POLICIES = [{"name": "topk", "keep": 0.25, "along": "rows"}]


class Failing(Trainer):
    """Fails at the fifth loss, by the error in ``error``."""

    error: BaseException | None = None
    calls = 0

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 5 and self.error is not None:
            raise self.error
        return Trainer.compute_loss(self, model, inputs, *args, **kwargs)


def build(door: Make, folder: Path, base: type[Trainer] = Trainer, policies: Any = POLICIES, **options: Any) -> Any:
    return door(
        base,
        policies,
        {"log_flops_every": None},
        model=make_model(),
        args=make_arguments(folder, max_steps=6, **options),
        train_dataset=make_examples(12),
        eval_dataset=make_examples(2),
    )


@pytest.mark.always("PolicyTrainer-RuntimeError('boom')", "PolicyCallback-KeyboardInterrupt()")
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_after_an_error_in_the_middle_the_model_is_given_back(error: BaseException, door: Make, tmp_path: Path) -> None:
    trainer = build(door, tmp_path, Failing)
    classes = {name: type(module) for name, module in trainer.model.named_modules()}
    trainer.error = error
    with pytest.raises(type(error)):
        trainer.train()
    assert trainer.calls == 5
    assert is_free(trainer)
    assert classes == {name: type(module) for name, module in trainer.model.named_modules()}
    trainer.model(**{key: value[None] for key, value in make_examples(1)[0].items()}).loss.backward()
    trainer.model.zero_grad()
    trainer.train()  # another attempt
    assert is_free(trainer)
    assert trainer.policy_callback.engine.report().num_backwards == 6


class Interrupting(TrainerCallback):
    """Fails between a backward and the optimizer's step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_after_an_error_in_another_callback_too(door: Make, tmp_path: Path) -> None:
    trainer = build(door, tmp_path)
    trainer.add_callback(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert is_free(trainer)


def test_train_called_twice_goes_on_as_trainer_does(door: Make, tmp_path: Path) -> None:
    twice = []
    for make in (
        lambda: Trainer(
            model=make_model(), args=make_arguments(tmp_path, max_steps=6), train_dataset=make_examples(12)
        ),
        lambda: build(door, tmp_path, policies=["dense"]),
    ):
        trainer = make()
        trainer.train()
        first = weights(trainer.model)
        trainer.train()
        assert differing(first, weights(trainer.model))
        twice.append(weights(trainer.model))
    assert differing(*twice) == []
    assert is_free(trainer)


def test_a_second_training_has_an_engine_of_its_own(door: Make, tmp_path: Path) -> None:
    trainer = build(door, tmp_path)
    assert trainer.policy_callback.engine is None
    trainer.train()
    first = trainer.policy_callback.engine
    trainer.train()
    assert trainer.policy_callback.engine is not first
    assert first.report().num_backwards == trainer.policy_callback.engine.report().num_backwards == 6
    assert first.report().kept_share == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("door", [CALLBACK], indirect=True)
def test_a_batch_that_is_too_large_is_halved_and_training_begins_again(door: Make, tmp_path: Path) -> None:
    class Hungry(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if len(inputs["input_ids"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return Trainer.compute_loss(self, model, inputs, *args, **kwargs)

    trainer = build(door, tmp_path, Hungry, per_device_train_batch_size=4, auto_find_batch_size=True)
    trainer.train()
    assert trainer._train_batch_size < 4
    assert trainer.policy_callback.engine.report().num_backwards == 6
    assert is_free(trainer)


def test_a_model_made_for_each_training_is_attached_each_time(door: Make, tmp_path: Path) -> None:
    trainer = door(
        Trainer,
        POLICIES,
        {},
        model_init=lambda _: make_model(),
        args=make_arguments(tmp_path, max_steps=4),
        train_dataset=make_examples(8),
    )
    found = []
    for _ in range(2):
        trainer.train()
        found.append(weights(trainer.model))
        assert is_free(trainer)
    assert differing(*found) == []


def test_a_callback_that_has_not_joined_says_what_to_do(tmp_path: Path) -> None:
    callback = sbp.PolicyCallback(POLICIES)
    arguments = {
        "model": make_model(),
        "args": make_arguments(tmp_path, max_steps=2),
        "train_dataset": make_examples(8),
    }
    trainer = Trainer(callbacks=[callback], **arguments)
    with pytest.raises(UsageError, match=r"call callback.join\(trainer\) before trainer.train\(\)"):
        trainer.train()
    assert callback.join(trainer) is callback
    trainer.train()
    assert callback.engine is not None
    assert callback.engine.report().num_backwards == 2
    with pytest.raises(UsageError, match="has already joined a trainer"):
        callback.join(Trainer(**arguments))
