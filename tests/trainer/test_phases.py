"""A schedule in a Trainer trains what a Trainer trains whose policies are replaced by hand; it resumes in its phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError, UsageError
from sparsebp_cli.trainer import PolicyCallback, PolicyTrainer

from .conftest import Make, differing, is_free, make_arguments, make_examples, make_model, weights

ROWS = [{"name": "topk", "keep": 0.25, "along": "rows", "error_feedback": True}]
DRAWN = [{"name": "random", "keep": 0.5, "along": "rows", "weighted": True}]
TOKENS = [{"name": "tokens", "score": "random", "keep": 0.5}]
SCHEDULE: list[Any] = [{"until": 0.5, "policy": ROWS}, {"until": 0.75, "policy": "dense"}, {"policy": DRAWN}]
OPTIONS = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}


def build(door: Make, folder: Path, schedule: Any = SCHEDULE, **options: Any) -> Any:
    return door(
        Trainer,
        (),
        {"schedule": schedule},
        model=make_model(attention_dropout=0.1),
        args=make_arguments(folder, **(OPTIONS | options)),
        train_dataset=make_examples(20),
    )


class ByHand(TrainerCallback):
    """Replace the engine between two steps, as a user without a schedule would."""

    def __init__(self, trainer: Trainer, policies: dict[int, Any]) -> None:
        self.trainer, self.policies = trainer, policies
        self.engine: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        if step in self.policies:
            if self.engine is not None:
                self.engine.detach()
            self.engine = sbp.attach(
                self.trainer.model,
                self.policies[step],
                optimizer=self.trainer.optimizer,
                seed=args.seed,
                num_steps=state.max_steps,
            )
            self.engine.load_state_dict(self.engine.state_dict() | {"index": step})
            self.trainer.accelerator.backward = lambda loss, **_: self.engine.backward(loss)


@pytest.mark.always("PolicyTrainer")
def test_a_schedule_equals_policies_that_are_replaced_by_hand(door: Make, tmp_path: Path) -> None:
    trainer = build(door, tmp_path, save_strategy="no")
    trainer.train()
    plain = Trainer(
        model=make_model(attention_dropout=0.1),
        args=make_arguments(tmp_path, **(OPTIONS | {"save_strategy": "no"})),
        train_dataset=make_examples(20),
    )
    plain.add_callback(hand := ByHand(plain, {0: ROWS, 4: "dense", 6: DRAWN}))
    plain.train()
    hand.engine.detach()
    assert differing(weights(plain.model), weights(trainer.model)) == []
    assert is_free(trainer)
    report = trainer.policy_callback.engine.report()
    assert report.num_backwards == 16
    assert report.kept_share == pytest.approx((4 * 0.25 + 2 * 1.0 + 2 * 0.5) / 8)
    logged = next(line for line in trainer.state.log_history if "train_loss" in line)
    assert logged["policy/kept_share"] == report.kept_share


@pytest.mark.always("PolicyTrainer-2", "PolicyTrainer-4", "PolicyCallback-6")
@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_training_resumes_in_the_right_phase_to_the_same_bits(step: int, door: Make, tmp_path: Path) -> None:
    whole = build(door, tmp_path)
    whole.train()
    resumed = build(door, tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert differing(weights(whole.model), weights(resumed.model)) == []
    other = build(door, tmp_path / "third", [{**SCHEDULE[0], "until": 0.6}, *SCHEDULE[1:]])
    with pytest.raises(UsageError, match=r"schedule.0.until was 0.5, got 0.6"):
        other.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))


@pytest.mark.always("PolicyTrainer")
def test_under_autocast_a_later_phase_may_replace_the_forward(door: Make, tmp_path: Path) -> None:
    """Where a recipe refuses it: here the engine is put inside of what autocast has wrapped, at a boundary as well."""
    twice = [{"until": 0.5, "policy": TOKENS}, {"policy": TOKENS}]
    options = {"bf16": True, "save_strategy": "no", "gradient_accumulation_steps": 1}
    phased = build(door, tmp_path, twice, **options)
    phased.train()
    alone = PolicyTrainer(
        policies=TOKENS,
        model=make_model(attention_dropout=0.1),
        args=make_arguments(tmp_path, **(OPTIONS | options)),
        train_dataset=make_examples(20),
    )
    alone.train()
    assert differing(weights(alone.model), weights(phased.model)) == []


def test_what_cannot_be_a_schedule_is_refused_by_name(tmp_path: Path) -> None:
    def make(schedule: Any, **more: Any) -> None:
        arguments = make_arguments(tmp_path, **OPTIONS)
        PolicyTrainer(
            schedule=schedule, model=make_model(), args=arguments, train_dataset=make_examples(4), **more
        ).train()

    with pytest.raises(UsageError, match="give only one of policies and schedule, got both"):
        PolicyCallback(ROWS, schedule=SCHEDULE)
    with pytest.raises(UnsupportedError, match="chooses the examples of an epoch"):
        make([{"until": 0.5, "policy": "dense"}, {"policy": {"name": "infobatch"}}])
    with pytest.raises(UsageError, match=r"0.01 leaves phase 0 without a step, because num_steps is 8"):
        make([{"until": 0.01, "policy": "dense"}, {"policy": DRAWN}])
    assert torch.is_grad_enabled()


@pytest.mark.always("PolicyTrainer")
def test_a_held_learning_rate_goes_on_in_a_resumed_phase(door: Make, tmp_path: Path) -> None:
    turns = {"name": "frozen", "turn": "layers", "every": 2, "optimizer_state": "cpu", "learning_rate": "cycle"}
    schedule = [{"until": 0.5, "policy": "dense"}, {"policy": turns}]  # a cycle of four steps
    whole = build(door, tmp_path, schedule)
    whole.train()
    resumed = build(door, tmp_path / "again", schedule)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert differing(weights(whole.model), weights(resumed.model)) == []
    state = whole.policy_callback.engine.state_dict()
    assert state["held_rates"] == resumed.policy_callback.engine.state_dict()["held_rates"]
    assert list(state["held_rates"].values()) == pytest.approx([1e-2 * 0.5] * 2)  # of step 4 of 8, by the schedule
