"""Answers that are drawn in a policy update: the gradient of all in the mean over draws, for less work."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback

import sparsebp_cli as sbp
from sparsebp_cli.errors import UnsupportedError
from sparsebp_shelf.example import Uniform

from .conftest import differing, distance, make_model, weights
from .fused import Fused, policy_loss, preference_loss
from .test_trl import dpo, grpo, lora, train
from .test_trl_waste import same_logs

pytestmark = pytest.mark.filterwarnings("ignore")  # trl warns of its own defaults, and transformers of trl's
LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "DPO": lambda output, _: preference_loss(output),
    "GRPO": policy_loss,
}
TOKENS = {"name": "tokens", "score": "random", "keep": 0.25}
# With it torch's counter knows the products of the gradients of trl's head.
IN_PLACE = {torch.ops.aten.addmm_: lambda _, one, other, *__, **___: 2 * one[0] * one[1] * other[1]}
UNIFORM = {"name": "uniform", "start": 0, "end": 1, "interrupt": 0}


def small(answer: int) -> Fused:
    """One group of four answers in float64; trl's head returns float32 all the same."""
    made = Fused(groups=1, answer=answer)
    made.model.double()
    made.weights = torch.tensor([1.2, -0.7, 0.0, -0.5])
    return made


def flat(grads: list[Tensor]) -> Tensor:
    return torch.cat([grad.double().flatten() for grad in grads])


@pytest.mark.parametrize("packer", [(), ("lossless",)], ids=["alone", "lossless"])
def test_the_mean_over_all_draws_of_uniform_answers_is_the_gradient_of_all(
    packer: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, mean = small(answer=3), torch.zeros(())
    LOSSES["DPO"](made.run(made.model), made.weights).backward()  # type: ignore[no-untyped-call]
    wanted = flat(made.grads(made.model))
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    told = iter(pairs)
    monkeypatch.setattr(Uniform, "choose", lambda *_: torch.tensor(next(told)))
    with sbp.attach(made.model, [*packer, UNIFORM]) as engine:
        for _ in pairs:
            engine.backward(LOSSES["DPO"](made.run(made.model), made.weights))
            mean = mean + flat(made.grads(made.model)) / len(pairs)
    assert float((mean - wanted).norm() / wanted.norm()) < 2e-6


def test_what_is_not_drawn_has_no_backward() -> None:
    counts: dict[str, tuple[int, int]] = {}
    for name, policies in {"plain": [], "uniform": [UNIFORM]}.items():
        made = Fused()
        with sbp.attach(made.model, policies) as engine:
            with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as forward:
                loss = policy_loss(made.run(made.model), made.weights)
            with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as backward:
                engine.backward(loss)
        counts[name] = int(forward.get_total_flops()), int(backward.get_total_flops())
    assert counts["uniform"][0] == counts["plain"][0]
    assert counts["uniform"][1] == counts["plain"][1] // 2


CASES: dict[str, tuple[Callable[..., Any], list[Any], dict[str, Any]]] = {
    "DPO, lossless, uniform, lora": (dpo, ["lossless", UNIFORM], {"peft_config": lora}),
    "DPO, uniform": (dpo, [UNIFORM], {}),
    "GRPO, uniform, reference": (grpo, [UNIFORM], {"beta": 0.1}),
    "GRPO, uniform": (grpo, [UNIFORM], {}),
    "GRPO, lossless, uniform": (grpo, ["lossless", UNIFORM], {}),
    "GRPO, uniform, bf16": (grpo, [UNIFORM], {"bf16": True}),
}


@pytest.mark.slow
@pytest.mark.always("DPO, uniform", "GRPO, lossless, uniform")
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_that_draws_logs_the_values_of_all(name: str, tmp_path: Path) -> None:
    make_trainer, policies, options = CASES[name]
    options = {key: value() if key == "peft_config" else value for key, value in options.items()} | {"max_steps": 3}
    expected, log, _ = train(make_trainer, tmp_path / "plain", None, **options)
    found, own, _ = train(make_trainer, tmp_path / "drawn", policies, **options)
    norms = [lines[0].pop("grad_norm") for lines in (log, own)]
    if "bf16" not in name:
        same_logs(log[:1], own[:1])  # of the same weights: but for the gradient, nothing that is logged is estimated
    assert norms[1] != pytest.approx(norms[0], rel=1e-3)
    assert 1e-6 < distance(expected, found) < 0.2
    if make_trainer is not grpo:  # whose steps the callback does not count
        assert own[0]["flops/backward_executed"] < own[0]["flops/backward_dense"]


class Stop(TrainerCallback):
    """An error in the middle of a training."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step + 1:  # the checkpoint of the step before is there, and this one is lost
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("policies", [["lossless"], [UNIFORM]], ids=["lossless", "drawn"])
def test_a_stopped_policy_update_goes_on_to_the_same_bits(policies: list[Any], tmp_path: Path) -> None:
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1}

    def build(folder: str) -> Any:
        torch.manual_seed(0)
        trainer = grpo(tmp_path / folder, make_model(max_position_embeddings=128), **options)
        sbp.PolicyCallback(policies).join(trainer)
        return trainer

    whole = build("whole")
    whole.train()
    first = build("stopped")
    first.add_callback(Stop(random.Random(str(policies)).randint(1, 4)))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    again = build("stopped")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert differing(weights(whole.model), weights(again.model)) == []


@pytest.mark.parametrize(
    "policy",
    [
        TOKENS,
        {**TOKENS, "mode": "detach"},
        {"name": "tokens", "score": "mask", "mask_column": "loss_mask"},
        {"name": "selective-backprop", "start": 0, "end": 1, "interrupt": 0},
        {"name": "importance"},
    ],
    ids=str,
)
def test_what_the_head_cannot_give_is_refused_by_name(policy: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="not supported with trl's fused head") as caught:
        sbp.attach(Fused().model, [policy])
    assert "\n" not in str(caught.value)


def test_a_forward_past_the_head_is_refused() -> None:
    made = Fused()
    with (
        sbp.attach(made.model, [UNIFORM]),
        pytest.raises(UnsupportedError, match="in training without this head"),
    ):
        made.model(input_ids=made.ids)
    with torch.no_grad(), sbp.attach(made.model, [UNIFORM]):
        assert made.model(input_ids=made.ids).logits.shape == (16, 32, 64)


def test_the_way_out_of_the_head_gives_a_loop_of_ones_own_its_policy() -> None:
    made = Fused(groups=1)
    with pytest.raises(UnsupportedError, match=r"`del model\.forward`"):
        sbp.attach(made.model, [TOKENS, "lossless"])
    del made.model.forward
    with sbp.attach(made.model, [TOKENS, "lossless"]) as engine:
        engine.backward(made.model(input_ids=made.ids, labels=made.labels).loss)
        assert engine.report().chosen is not None
