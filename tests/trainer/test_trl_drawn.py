"""Tokens and answers that are drawn in a policy update: the gradient of all in the mean over draws, for less work."""

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
from sparsebp_cli.policy import sampling
from sparsebp_shelf.example import Uniform

from .conftest import differing, distance, make_model, weights
from .fused import Fused, draws, policy_loss, preference_loss
from .test_trl import dpo, grpo, lora, sft, train
from .test_trl_waste import same_logs

pytestmark = pytest.mark.filterwarnings("ignore")  # trl warns of its own defaults, and transformers of trl's
LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "DPO": lambda output, _: preference_loss(output),
    "GRPO": policy_loss,
}
TOKENS = {"name": "tokens", "score": "random", "keep": 0.25}
ENTROPY = {"name": "tokens", "score": "entropy", "keep": 0.25}
MASK = {"name": "tokens", "score": "mask"}
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


def mean_over_draws(
    made: Fused, policies: list[Any], loss: str, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the plain gradient, the mean over all draws, and each of them; the engine draws what it is told."""
    plain = made.run(made.model)
    LOSSES[loss](plain, made.weights).backward()  # type: ignore[no-untyped-call]
    wanted, told = flat(made.grads(made.model)), list[tuple[int, ...]]()
    asked = list[Tensor]()

    def draw(probability_N: Tensor, number: int, _: torch.Generator) -> Tensor:
        assert number == num_kept
        asked.append(probability_N)
        return torch.tensor(told[-1] if told else range(number))

    monkeypatch.setattr(sampling, "draw", draw)
    mean, found = torch.zeros_like(wanted), list[Tensor]()
    with sbp.attach(made.model, policies) as engine:
        engine.backward(LOSSES[loss](made.run(made.model), made.weights))
        made.grads(made.model)
        outcomes = list(draws(asked[-1], num_kept))
        assert sum(share for share, _ in outcomes) == pytest.approx(1.0)
        for share, outcome in outcomes:
            told.append(outcome)
            output = made.run(made.model)
            for name in ("log_probs", "entropy", "loss"):  # whatever is drawn, the values are those of all
                torch.testing.assert_close(getattr(output, name), getattr(plain, name), rtol=1e-5, atol=1e-5)
            engine.backward(LOSSES[loss](output, made.weights))
            found.append(flat(made.grads(made.model)))
            mean += share * found[-1]
            assert torch.equal(asked[-1], asked[0])
    return wanted, mean, found


@pytest.mark.parametrize("packer", [(), ("lossless",)], ids=["alone", "lossless"])
@pytest.mark.parametrize("loss", ["DPO", "GRPO"])
@pytest.mark.parametrize("score", ["loss", "entropy"])
def test_the_mean_over_all_draws_of_tokens_is_the_gradient_of_all(
    score: str, loss: str, packer: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small(answer=1)
    made.labels[0, -2] = made.ids[0, -2]  # five labels in four answers
    policy = {"name": "tokens", "score": score, "draw": "proportional", "keep": 0.4}
    wanted, mean, found = mean_over_draws(made, [*packer, policy], loss, 2, monkeypatch)
    assert len(found) == 10
    assert float((mean - wanted).norm() / wanted.norm()) < 2e-6
    assert min(float((one - wanted).norm() / wanted.norm()) for one in found) > 0.05


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


@pytest.mark.parametrize("policy", [TOKENS, ENTROPY, MASK], ids=str)
def test_the_chosen_rows_of_the_head_have_the_gradient_of_the_masked_values(policy: Any) -> None:
    found = list[Tensor]()
    for execution in ("fast", "reference"):
        made = Fused()
        with sbp.attach(made.model, [policy], execution=execution) as engine:
            output = made.run(made.model)
            engine.backward(policy_loss(output, made.weights) + 0.1 * (output.entropy**2).mean())
        found.append(flat(made.grads(made.model)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-8)


def test_entropy_keeps_what_the_quantile_of_trl_keeps() -> None:
    """As ``GRPOTrainer.get_high_entropy_mask`` in one process, of 128 labels of which both keep 32."""
    made, losses = Fused(), list[Tensor]()
    output = made.run(made.model)
    entropy = output.entropy[:, -8:].detach()
    kept = entropy >= torch.quantile(entropy.flatten(), 0.75)
    assert kept.sum() == 32
    terms = output.log_probs[:, -8:] * made.weights[:, None]
    (terms * kept).sum().backward()
    wanted = flat(made.grads(made.model))
    with sbp.attach(made.model, [ENTROPY]) as engine:
        losses.append((made.run(made.model).log_probs[:, -8:] * made.weights[:, None]).sum())
        engine.backward(losses[0])
    torch.testing.assert_close(flat(made.grads(made.model)), wanted, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(losses[0], terms.sum())  # the loss is that of all


def test_what_is_not_drawn_has_no_backward() -> None:
    counts: dict[str, tuple[int, int]] = {}
    for name, policies in {"plain": [], "tokens": [TOKENS], "uniform": [UNIFORM]}.items():
        made = Fused()
        with sbp.attach(made.model, policies) as engine:
            with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as forward:
                loss = policy_loss(made.run(made.model), made.weights)
            with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as backward:
                engine.backward(loss)
        counts[name] = int(forward.get_total_flops()), int(backward.get_total_flops())
    head, rows = 2 * 32 * 64, 16 * 31  # one product of a row; trl computes all positions on a CPU
    # The head: once for the 128 labels; again, with trl's three products of the backward, for 32.
    assert counts["tokens"][0] == counts["plain"][0] - (rows - 128) * head
    assert counts["tokens"][1] == counts["plain"][1] - 3 * rows * head + 4 * 32 * head
    assert counts["uniform"][0] == counts["plain"][0]
    assert counts["uniform"][1] == counts["plain"][1] // 2


@pytest.mark.slow
def test_a_quantile_of_trls_own_trains_the_same_weights_for_fewer_rows(tmp_path: Path) -> None:
    options = {"max_steps": 6, "top_entropy_quantile": 0.25}
    runs, spent = [], []
    for name, policies in (("plain", None), ("own", [MASK])):
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            runs.append(train(grpo, tmp_path / name, policies, **options))
        spent.append(counter.get_total_flops())
    (expected, log, _), (found, own, engine) = runs
    assert distance(expected, found) < 1e-5
    same_logs(log, own)
    # Both write the same answers. trl computes all positions of the head on a CPU, four products each.
    assert spent[1] < spent[0]
    chosen = engine.report().chosen
    assert chosen.trained == chosen.targets > 0


CASES: dict[str, tuple[Callable[..., Any], list[Any], dict[str, Any]]] = {
    "SFT, tokens": (sft, [TOKENS], {}),
    "DPO, tokens": (dpo, [TOKENS], {}),
    "DPO, lossless, tokens, lora": (dpo, ["lossless", TOKENS], {"peft_config": lora}),
    "DPO, uniform": (dpo, [UNIFORM], {}),
    "GRPO, tokens, reference": (grpo, [{**TOKENS, "score": "entropy", "draw": "proportional"}], {"beta": 0.1}),
    "GRPO, uniform": (grpo, [UNIFORM], {}),
    "GRPO, lossless, tokens, uniform": (grpo, ["lossless", TOKENS, UNIFORM], {}),
    "GRPO, uniform, bf16": (grpo, [UNIFORM, TOKENS], {"bf16": True}),
}


@pytest.mark.slow
@pytest.mark.always("DPO, tokens", "GRPO, lossless, tokens, uniform")
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
@pytest.mark.parametrize("policies", [["lossless"], [TOKENS, UNIFORM]], ids=["lossless", "drawn"])
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
        {**TOKENS, "mode": "detach"},
        {**TOKENS, "within": "example"},
        {**TOKENS, "score": "gradient_norm"},
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
    for policy in (TOKENS, UNIFORM):
        with (
            sbp.attach(made.model, [policy]),
            pytest.raises(UnsupportedError, match=r"(in training|ran) without (this|the) head"),
        ):
            made.model(input_ids=made.ids)
    with torch.no_grad(), sbp.attach(made.model, [TOKENS, UNIFORM]):
        assert made.model(input_ids=made.ids).logits.shape == (16, 32, 64)


def test_the_way_out_of_the_head_gives_a_loop_of_ones_own_its_policy() -> None:
    made = Fused(groups=1)
    with sbp.attach(made.model, [TOKENS, "lossless"]) as engine:
        loss = made.model(input_ids=made.ids, labels=made.labels).loss
        with pytest.raises(UnsupportedError, match=r"`del model\.forward`"):
            engine.backward(loss)
    del made.model.forward
    with sbp.attach(made.model, [TOKENS, "lossless"]) as engine:
        engine.backward(made.model(input_ids=made.ids, labels=made.labels).loss)
        assert engine.report().chosen is not None
