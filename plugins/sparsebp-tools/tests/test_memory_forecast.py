"""A step on tensors without data takes the memory that PyTorch's allocator records for the real one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops
from sparsebp_tools.forecast.fake import FakeRecord, pretend
from sparsebp_tools.memory import MemoryCurve, memory_trace
from sparsebp_tools.memory.curve import PHASES
from sparsebp_tools.memory.watch import MemoryWatch

WIDTH = 512  # of the vocabulary
LLAMA = LlamaConfig(
    vocab_size=WIDTH,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
GPT2 = GPT2Config(vocab_size=WIDTH, n_embd=64, n_layer=2, n_head=4, n_positions=64)
MODELS: dict[str, Callable[[], Any]] = {  # each with a config of its own, which the engine changes
    "llama": lambda: LlamaForCausalLM(copy.deepcopy(LLAMA)),
    "gpt2": lambda: GPT2LMHeadModel(copy.deepcopy(GPT2)),
}
POLICIES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "dense": [],
    "rows": [("topk", {"keep": 0.25, "along": "rows"})],
    "frozen": [("frozen", {"freeze": ["*layers.0.*"]})],
    "lossless": [("lossless", {"verify": "never"})],
    "lossless, compared": [("lossless", {"verify": "always"})],
    "tokens by loss": [("tokens", {"keep": 0.25, "score": "loss"})],
    "examples by loss": [("importance", {"keep": 0.5, "threshold": 0})],
}


def _train(family: str, policy: str, *, fake: bool) -> tuple[MemoryCurve, int]:
    """Return the memory of a second step, and its FLOPs."""
    torch.manual_seed(0)
    ids = torch.randint(0, WIDTH, (2, 32))
    labels = ids.clone()
    labels[:, :16] = -100
    with pretend(gpu=False) if fake else nullcontext():
        model = MODELS[family]().train()
        model.config.use_cache = False
        optimizer = torch.optim.AdamW(model.parameters())
        policies = [sbp.make_policy(name, **options) for name, options in POLICIES[policy]]
        engine = sbp.attach(model, policies, optimizer=optimizer)
        record = FakeRecord(WIDTH)

        def step(begin: object = None) -> None:
            mark = begin if callable(begin) else lambda _: None
            mark("forward")
            loss = model(input_ids=ids, labels=labels).loss
            mark("backward")
            engine.backward(loss)
            del loss
            mark("update")
            optimizer.step()
            optimizer.zero_grad()

        step()
        gc.collect()
        if fake:
            with record, MemoryWatch(record, model, optimizer), count_flops() as flops:
                step(record.begin)
            return record.take_curve(), flops.total
        with memory_trace(model, optimizer) as trace:
            step(trace.begin)
        with count_flops() as flops:
            step()
        return trace.curve, flops.total


@pytest.mark.parametrize(
    ("family", "policy"), [*(("llama", policy) for policy in POLICIES), ("gpt2", "dense"), ("gpt2", "rows")]
)
def test_a_step_without_data_has_the_peaks_and_flops_of_the_real_one(family: str, policy: str) -> None:
    (real, real_flops), (fake, fake_flops) = (_train(family, policy, fake=is_fake) for is_fake in (False, True))
    # Which tokens or examples a run chooses, and so how many rows they need, is not known.
    is_known = "by loss" not in policy
    assert fake_flops == (real_flops if is_known else pytest.approx(real_flops, rel=0.1))
    for phase in PHASES:
        measured, found = real.within(phase), fake.within(phase)
        assert measured is not None
        assert found is not None
        assert found.split.total == pytest.approx(measured.split.total, rel=0.01 if is_known else 0.1)
        assert found.split.weights == measured.split.weights
        assert found.split.optimizer == measured.split.optimizer


def test_logits_are_what_has_the_width_of_the_vocabulary() -> None:
    with pretend(gpu=False):
        head, x = torch.nn.Linear(8, WIDTH, bias=False), torch.randn(4, 8, requires_grad=True)
        record = FakeRecord(WIDTH)
        record.note(head.weight, "weights")
        with record:
            logits = head(x)
            kept = logits * 2.0
            kept.sum()
        curve = record.take_curve()
        assert record.count_logits(curve.peak) == {"workspace": 2 * 4 * WIDTH * 4}
        del logits, kept


def test_what_follows_from_ids_is_real_and_what_follows_from_weights_is_not() -> None:
    with pretend(gpu=False):
        labels = torch.tensor([[1, -100, 3], [-100, -100, 6]])
        assert (labels != -100).nonzero().tolist() == [[0, 0], [0, 2], [1, 2]]
        rows = torch.randn(2, 3, 5)[labels != -100]
        assert rows.shape == (3, 5)
        weight = torch.empty(1 << 20, 1 << 20)  # four terabytes
        assert weight.norm().item() == 1
        assert bool((weight > 0).any())


def test_numbers_in_expressions_are_known_and_reads_of_unknown_ones_are_counted() -> None:
    with pretend(gpu=False) as stand_ins:
        weight_N = torch.where(torch.tensor([True, False]), 1.0, torch.rand(2, generator=torch.Generator()))
        assert weight_N[0].item() == 1.0
        assert stand_ins.number == 0
        weight = torch.empty(4)
        with torch.inference_mode():  # where item is no operator below another one
            assert repr(weight.sum().item()) == "1.0", "a number of the tensor's kind"
        assert stand_ins.number == 1


def test_the_stand_in_for_fused_attention_counts_and_stores_what_a_fused_kernel_does() -> None:
    shape = (2, 4, 16, 8)
    with pretend(gpu=True), count_flops() as flops:
        query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1)
        output.sum().backward()
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    with count_flops() as expected:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    assert flops.total == expected.total
    assert output.shape == shape


def test_a_module_without_data_can_be_copied_deeply_and_the_copy_is_its_own() -> None:
    """peft copies what ``modules_to_save`` names. PyTorch's own copy writes to the null pointer."""
    with pretend(gpu=True):
        module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        module[0].bias.requires_grad_(False)
        copied = copy.deepcopy(module)
        shapes = [(name, p.shape, p.requires_grad) for name, p in module.named_parameters()]
        assert shapes == [(name, p.shape, p.requires_grad) for name, p in copied.named_parameters()]
        assert all(isinstance(p, nn.Parameter) for p in copied.parameters())
        assert not {id(p) for p in module.parameters()} & {id(p) for p in copied.parameters()}
        twice = copy.deepcopy([module[0].weight, module[0].weight])
        assert twice[0] is twice[1], "what was shared stays shared"
        copied(torch.zeros(2, 8)).sum().backward()
        assert copied[0].weight.grad is not None
