"""Options of policies that change over the training."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError, UsageError
from sparsebp_cli.policy import Schedule, Step, make_policy

FALL = {"from": 1.0, "to": 0.25, "over": 0.5, "by": "linear"}
NUM_STEPS = 8


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def make_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def train_step(model: nn.Module, engine: sbp.Engine, optimizer: torch.optim.Optimizer, index: int) -> None:
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(index))
    engine.backward(model(data).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def keep_at(index: int, over: float = 0.5) -> float:
    return max(0.25, 1.0 - 0.75 * index / (over * NUM_STEPS))


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("linear", [1.0, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [1.0, 0.868198051534, 0.55, 0.231801948466, 0.1, 0.1]),
        ("step", [1.0, 1.0, 1.0, 1.0, 0.1, 0.1]),
    ],
)
def test_each_curve_has_its_numbers_and_ends_exactly(by: str, expected: list[float]) -> None:
    schedule = Schedule.model_validate({"from": 1.0, "to": 0.1, "over": 0.5, "by": by})
    values = [schedule.value(index, 8) for index in range(6)]
    assert values == pytest.approx(expected, abs=1e-12)
    assert (values[0], values[-1]) == (1.0, 0.1)


def test_a_scheduled_run_equals_one_whose_policy_is_replaced_at_every_step() -> None:
    policy = {"name": "random", "along": "rows"}
    model, plain = make_model(), make_model()
    optimizer, other = (torch.optim.AdamW(each.parameters(), 0.01) for each in (model, plain))
    engine = sbp.attach(model, {**policy, "keep": FALL}, optimizer=optimizer, num_steps=NUM_STEPS)
    for index in range(NUM_STEPS):
        train_step(model, engine, optimizer, index)
        with sbp.attach(plain, {**policy, "keep": keep_at(index)}, optimizer=other, num_steps=NUM_STEPS) as once:
            once.load_state_dict({**once.state_dict(), "index": index})
            train_step(plain, once, other, index)
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_the_claim_of_each_step_is_that_of_its_value() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    policy = {"name": "topk", "along": "rows", "keep": FALL}
    engine, shares = sbp.attach(model, policy, optimizer=optimizer, num_steps=NUM_STEPS), []
    for index in range(NUM_STEPS):
        train_step(model, engine, optimizer, index)
        shares.append((engine.claim().claimed_flops / engine.claim().dense_flops, engine.take_kept_share()))
    expected = [keep_at(index) for index in range(NUM_STEPS)]
    assert [claim for claim, _ in shares] == pytest.approx(expected)
    assert [kept for _, kept in shares] == pytest.approx(expected, abs=1 / 16)
    assert expected[0] == 1.0
    assert expected[4] == expected[-1] == 0.25


def test_a_resumed_run_goes_on_with_the_schedule_to_the_same_bits() -> None:
    def run(stop: int | None) -> dict[str, Tensor]:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        policy = {"name": "random", "along": "columns", "keep": {**FALL, "by": "cosine"}}
        engine = sbp.attach(model, policy, optimizer=optimizer, num_steps=NUM_STEPS)
        for index in range(NUM_STEPS):
            if index == stop:
                kept = model.state_dict(), optimizer.state_dict(), engine.state_dict()
                model = make_model(seed=1)
                model.load_state_dict(kept[0])
                optimizer = torch.optim.AdamW(model.parameters(), 0.01)
                optimizer.load_state_dict(kept[1])
                engine = sbp.attach(model, policy, optimizer=optimizer, num_steps=NUM_STEPS)
                engine.load_state_dict(kept[2])
            train_step(model, engine, optimizer, index)
        return model.state_dict()

    expected, resumed = run(None), run(3)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "dropbp"},
        {"name": "wta-crs"},
        {"name": "uniform", "start": 0.0, "end": 1.0, "interrupt": 0},
        {"name": "tokens", "score": "random", "mode": "exact"},
    ],
    ids=lambda policy: policy["name"],
)
def test_every_kind_of_policy_follows_a_schedule(policy: dict[str, Any]) -> None:
    """Dense bit for bit while the value is 1, another gradient after the step."""
    schedule = {"from": 1.0, "to": 0.3, "over": 0.5, "by": "step"}
    gradients = []
    for keep in (schedule, 1.0, 0.3):
        model = make_llama()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        engine = sbp.attach(model, {**policy, "keep": keep}, optimizer=optimizer, num_steps=2)
        seen = []
        for index in range(2):
            ids = torch.randint(0, 32, (6, 8), generator=torch.Generator().manual_seed(index))
            engine.backward(model(input_ids=ids, labels=ids).loss)
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
        gradients.append(seen)
    scheduled, dense, chosen = gradients
    assert same(scheduled[0], dense[0])
    assert same(scheduled[1], chosen[1])
    assert not same(dense[1], chosen[1])


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_schedule_is_an_option_that_is_written_and_read_again() -> None:
    policy = make_policy("topk", keep=FALL)
    options = json.loads(policy.model_dump_json())
    assert options["keep"] == FALL
    assert make_policy("topk", **options) == policy != make_policy("topk", keep=0.25)


@pytest.mark.parametrize("keep", [FALL, {**FALL, "from": 0.25, "to": 1.0}], ids=["falling", "rising"])
def test_what_a_policy_declares_holds_at_every_step_of_its_schedule(keep: dict[str, Any]) -> None:
    policy = make_policy("topk", keep=keep)
    assert not policy.exact
    ends = [policy.at(Step(index, num_steps=NUM_STEPS)) for index in (0, NUM_STEPS - 1)]
    assert sorted(end.exact for end in ends) == [False, True]
    assert not any(end.schedules for end in ends)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("topk", {"keep": {**FALL, "from": 1.5}}, r"keep: must be in \(0, 1\], got 1.5"),
        ("topk", {"keep": {"to": 0.5}}, "keep.from: missing"),
        ("topk", {"keep": {**FALL, "by": "cosin"}}, "keep.by: .*did you mean cosine"),
        ("topk", {"keep": {**FALL, "over": 2.0}}, "keep.over: must be at most 1, got 2.0"),
        (
            "frozen",
            {"turn": "layers", "every": FALL},
            "every: cannot follow a schedule: only real numbers can",
        ),
        (
            "uniform",
            {"start": {"from": 0.1, "to": 0.2}},
            "start: cannot follow a schedule: this option sets when",
        ),
        ("lossless", {"verify": {"from": 0.1, "to": 0.2}}, "verify: cannot follow a schedule: this kind"),
    ],
)
def test_a_wrong_schedule_is_refused_by_the_name_of_its_option(name: str, options: Any, text: str) -> None:
    with pytest.raises(PolicyError, match=f"policy '{name}': {text}"):
        make_policy(name, **options)


def test_a_schedule_needs_the_length_of_the_training() -> None:
    with pytest.raises(
        UsageError, match=r"TopK: keep follows a schedule: pass the number of steps to attach\(num_steps"
    ):
        sbp.attach(make_model(), {"name": "topk", "keep": FALL})
