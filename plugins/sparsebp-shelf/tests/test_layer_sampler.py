"""A layer sampler and trial passes decide with the values that a schedule has at the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import Field
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.policy import GradientSelector, Schedule, Stateful
from sparsebp_shelf.block import BlockDropper
from sparsebp_shelf.layer_sampler import LayerSampler


class Scaling(LayerSampler, GradientSelector):
    """Multiply the gradient of each example at each layer."""

    scale: float = Field(gt=0.0, le=4.0, description="Factor.")

    exact = property(lambda _: False)
    unbiased = property(lambda _: False)
    budget = property(lambda _: 1.0)
    selection = property(lambda _: None)

    def select(self, grad_NO: Tensor, site: Any, step: Any) -> None:
        return None

    def sample(self, norm_B: Tensor, output: Any, step: Any) -> Tensor:
        return torch.full_like(norm_B, self.scale)


def test_a_layer_sampler_follows_its_schedule() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_attention_heads=2, **sizes)).train()
    ids = torch.randint(0, 50, (3, 6))
    weight = model.model.layers[0].mlp.up_proj.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(input_ids=ids, labels=ids).loss.backward()
    dense = float(weight.grad.norm())
    schedule = Schedule.model_validate({"from": 1.0, "to": 0.5})
    policy, found = Scaling(scale=0.5).follow({"scale": schedule}), []
    with sbp.attach(model, [policy], optimizer=optimizer, num_steps=2) as engine:
        for _ in range(3):
            optimizer.zero_grad()
            engine.backward(model(input_ids=ids, labels=ids).loss)
            found.append(float(weight.grad.norm()) / dense)
            optimizer.step()
    assert found == pytest.approx([1.0, 0.75**2, 0.5**2], rel=1e-4)


SEEN: list[tuple[int, float]] = []


class Trying(Stateful, BlockDropper):
    """Record the option that each decision sees; try one pass before each step."""

    keep: float = Field(gt=0.0, le=1.0, description="Fraction of the blocks.")

    budget = property(lambda self: self.keep)

    def drop(self, blocks: Any, step: Any) -> list[str]:
        return []

    def init(self, places: Any, /) -> dict[str, Any]:
        return {"keep": 0.0}

    def wants_trials(self, step: Any) -> list[list[str]]:
        SEEN.append((step.index, self.keep))
        return [[]]

    def observe_trials(self, state: Any, observations: Any, step: Any) -> dict[str, Any]:
        return {"keep": self.keep}

    def observe(self, state: Any, observation: Any, step: Any) -> Any:
        return state


def test_trial_passes_follow_a_schedule() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_attention_heads=2, **sizes)).train()
    ids = torch.randint(0, 50, (3, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = Trying(keep=0.5).follow({"keep": Schedule.model_validate({"from": 1.0, "to": 0.5})})
    SEEN.clear()
    with sbp.attach(model, [policy], optimizer=optimizer, num_steps=2) as engine:
        for number in range(3):
            engine.run_trials(lambda: model(input_ids=ids, labels=ids).loss)
            engine.backward(model(input_ids=ids, labels=ids).loss)
            assert engine.state_dict()["policy_state"]["0/keep"] == (1.0, 0.75, 0.5)[number]
            optimizer.step()
    assert {*SEEN} >= {(0, 1.0), (1, 0.75), (2, 0.5)}
    assert all(value == (1.0, 0.75, 0.5, 0.5)[index] for index, value in SEEN)
