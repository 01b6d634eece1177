"""Attaching to a model of very many linears does work in proportion to their number, for every policy that attaches."""

from __future__ import annotations

import cProfile
import time
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparsebp_cli.backward import attach
from sparsebp_cli.errors import SparseBPError
from tests.chaos.way import WAYS

FEW, MANY = 15, 60  # layers of 7 linears
THOUSANDS = 1429  # 10,004 linears
WITH_POLICY = {way: sections for way, sections in WAYS.items() if "policy" in sections}
ELSEWHERE = {  # in the worker of a recipe alone, with a model or with data that this test does not have
    "rho", "lora-fa",
}  # fmt: skip


def build(num_layers: int) -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=num_layers, vocab_size=16))


def attach_as(sections: dict[str, Any], model: nn.Module) -> None:
    """Attach as a way to train does, and detach."""
    choices = {key: value for key, value in sections.get("backward", {}).items() if key in {"sites", "segments"}}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    attach(model, sections["policy"], optimizer=optimizer, num_steps=40, **choices).detach()


def count_calls(sections: dict[str, Any], model: nn.Module) -> int:
    profile = cProfile.Profile()
    profile.runcall(attach_as, sections, model)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    return build(FEW), build(MANY)


@pytest.mark.promise("R36")
@pytest.mark.always("topk rows", "subnet", "dropbp", "frozen in turn, at random", "max-child", "two policies")
@pytest.mark.parametrize("way", sorted(WITH_POLICY.keys() - ELSEWHERE))
def test_four_times_the_linears_take_four_times_the_calls(way: str, models: tuple[nn.Module, nn.Module]) -> None:
    attach_as(WITH_POLICY[way], models[0])  # what is imported and cached at the first time
    few, many = (count_calls(WITH_POLICY[way], model) for model in models)
    assert many < few * 1.1 * MANY / FEW


@pytest.mark.chaos
@pytest.mark.timeout(3000)  # of a busy machine, too
@pytest.mark.promise("R36")
def test_each_policy_is_attached_to_10000_linears(record_property) -> None:
    model, seconds = build(THOUSANDS), []
    for way in sorted(WITH_POLICY.keys() - ELSEWHERE):
        begin = time.process_time()
        attach_as(WITH_POLICY[way], model)
        seconds.append(time.process_time() - begin)
    record_property("trials", len(seconds))
    record_property("of which", ("in more than 5 s of CPU", sum(taken > 5.0 for taken in seconds)))
    record_property("of which", ("tenths of a second of CPU, the longest", round(10 * max(seconds))))


def test_what_is_left_out_here_cannot_be_attached_so() -> None:
    model = build(2)
    for way in ELSEWHERE:
        with pytest.raises(SparseBPError):
            attach_as(WITH_POLICY[way], model)
