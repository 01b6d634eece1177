"""What `lossless` leaves out in trainers of trl beside the step itself: references, and answers without advantage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.trainer_utils import IntervalStrategy

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError

from .conftest import distance
from .fused import Fused
from .test_trl import LOGGED, dpo, grpo, lora, train

pytestmark = pytest.mark.filterwarnings("ignore")  # trl warns of its own defaults, and transformers of trl's
STEPS = 6


class Forwards:
    """Hooks on a reference that count its FLOPs."""

    def __init__(self, model: nn.Module) -> None:
        self.flops: list[int] = []
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after)

    def _before(self, *_: Any) -> None:
        self._counter = FlopCounterMode(display=False).__enter__()

    def _after(self, *_: Any) -> None:
        self._counter.__exit__(None, None, None)
        self.flops.append(int(self._counter.get_total_flops()))


def same_logs(log: list[dict[str, float]], own: list[dict[str, float]]) -> None:
    names = (*LOGGED, "rewards/chosen", "frac_reward_zero_std", "clip_ratio/region_mean")
    for one, other in zip(log, own, strict=True):
        wanted = {key: one[key] for key in names if key in one}
        assert {key: other[key] for key in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_reference_of_dpo_costs_what_its_pairs_share_less(tmp_path: Path, *, evaluates: bool) -> None:
    counts: list[Forwards] = []

    def make(folder: Path, model: Any, **options: Any) -> Any:
        trainer = dpo(folder, model, **options)
        counts.append(Forwards(trainer.ref_model))
        if evaluates:
            trainer.eval_dataset = trainer.train_dataset.select(range(8))
            trainer.args.eval_strategy, trainer.args.eval_steps = IntervalStrategy.STEPS, 3
        return trainer

    options = {"max_steps": STEPS}
    expected, log, _ = train(make, tmp_path / "plain", None, **options)
    found, own, engine = train(make, tmp_path / "lossless", "lossless", **options)
    assert distance(expected, found) < 1e-5
    same_logs(log, own)
    plain, packed = (sum(sorted(count.flops)[:3]) for count in counts)
    assert packed < 0.7 * plain
    assert any("eval_loss" in one for one in own) == evaluates
    note = engine.notes["packing of the reference"]
    assert "outputs compared with the ordinary ones in" in note
    assert " 0 in a shared prefix" not in note


@pytest.mark.parametrize("case", ["adapters switched off", "old log-probabilities", "a reference"])
def test_forwards_of_the_policy_itself_are_packed(tmp_path: Path, case: str) -> None:
    make, options = {
        "adapters switched off": (dpo, {"peft_config": lora()}),
        "old log-probabilities": (grpo, {"gradient_accumulation_steps": 3, "steps_per_generation": 2}),
        "a reference": (grpo, {"beta": 0.1}),
    }[case]
    expected, log, _ = train(make, tmp_path / "plain", None, max_steps=STEPS, **options)
    found, own, engine = train(make, tmp_path / "lossless", "lossless", max_steps=STEPS, **options)
    assert distance(expected, found) < 1e-5
    same_logs(log, own)
    topic = "packing of the reference" if case == "a reference" else "packing without a gradient"
    assert "outputs compared with the ordinary ones in" in engine.notes[topic]
    assert "examples of weight 0" not in engine.notes["packing"] or case != "a reference"


def all_right_or_wrong(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Every second prompt has answers that are all worth the same."""
    number = [len(str(prompt)) % 2 for prompt in prompts]
    return [1.0 if dead else float(ids[0] % 2) for dead, ids in zip(number, completion_ids, strict=True)]


def test_answers_without_advantage_are_run_without_a_gradient_and_logged_as_ever(tmp_path: Path) -> None:
    def make(folder: Path, model: Any, **options: Any) -> Any:
        trainer = grpo(folder, model, **options)
        trainer.reward_funcs = [all_right_or_wrong]
        return trainer

    expected, log, _ = train(make, tmp_path / "plain", None, max_steps=STEPS)
    found, own, engine = train(make, tmp_path / "lossless", "lossless", max_steps=STEPS)
    assert any(0 < one.get("frac_reward_zero_std", 0) < 1 for one in log)
    assert distance(expected, found) < 1e-5
    same_logs(log, own)
    assert "examples of weight 0 run without a gradient" in engine.notes["packing"]


def test_examples_without_weight_have_the_outputs_of_all_and_no_backward() -> None:
    made, costs = Fused(), list[int]()
    plain = made.run(made.model)
    made.loss(plain, made.weights).backward()
    wanted = made.grads(made.model)
    with sbp.attach(made.model, [sbp.make_policy("lossless", verify="never")]) as engine:
        for weights in (None, made.weights, made.weights, made.weights):
            engine.columns(**({} if weights is None else {"example_weight": weights}))
            with FlopCounterMode(display=False) as counter:
                output = made.run(made.model)
                engine.backward(made.loss(output, made.weights))
            costs.append(int(counter.get_total_flops()))
            for one, other in zip(made.grads(made.model), wanted, strict=True):
                torch.testing.assert_close(one, other)
            for name in ("log_probs", "entropy", "loss", "label_mask"):
                torch.testing.assert_close(getattr(output, name), getattr(plain, name))
    # The two parts share no prefix: what is left out is the backward of one half, two thirds of its work.
    assert costs[3] == costs[2] < 0.75 * costs[1]
    assert "16 examples of weight 0 run without a gradient" in engine.notes["packing"]


def test_a_loss_that_adds_to_examples_without_weight_trains_them() -> None:
    made = Fused()
    made.loss(made.run(made.model), made.weights + 0.1).backward()
    wanted = made.grads(made.model)
    with sbp.attach(made.model, "lossless") as engine:
        engine.columns(example_weight=made.weights)
        for _ in range(2):
            engine.backward(made.loss(made.run(made.model), made.weights + 0.1))
            for one, other in zip(made.grads(made.model), wanted, strict=True):
                torch.testing.assert_close(one, other)
    assert "the loss gives them a gradient" in engine.notes["packing"]


def test_a_loss_that_changes_its_mind_is_refused() -> None:
    made = Fused()
    with sbp.attach(made.model, "lossless") as engine:
        engine.columns(example_weight=made.weights)
        engine.backward(made.loss(made.run(made.model), made.weights))
        made.grads(made.model)
        with pytest.raises(UnsupportedError, match="got no gradient in the first batch"):
            engine.backward(made.loss(made.run(made.model), made.weights + 0.1))
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_a_batch_without_any_advantage_has_a_gradient_of_zeros() -> None:
    made = Fused()
    with sbp.attach(made.model, "lossless") as engine:
        for _ in range(2):
            engine.columns(example_weight=torch.zeros(16))
            engine.backward(made.loss(made.run(made.model), torch.zeros(16)))
            assert not any(grad.any() for grad in made.grads(made.model))
