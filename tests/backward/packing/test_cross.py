"""Packing beside every other way of taking a step: every two of way, attention, padding, labels and prefixes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp

from .case import IGNORED, LIMIT, SOME, error, make_batch

ROOT = Path(__file__).parents[3]
ATTENTION = ("sdpa", "eager")
FEW = (SOME[0], SOME[4], SOME[6], SOME[9])  # every padding, kind of labels, and two prefixes: compiling takes seconds


def build(attention: str, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        pad_token_id=0,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).train()


def adapted(model: nn.Module) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    found: nn.Module = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return found


def checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model


PREPARE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "accumulation": lambda model: model,
    "checkpointing": checkpointed,
    "LoRA": adapted,
    "autocast": lambda model: model,
    "autocast, LoRA, checkpointing": lambda model: adapted(checkpointed(model)),
}


def accumulate(model: nn.Module, engine: sbp.Engine | None, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Return the gradients of one optimizer step over all batches; ``engine`` None: plain."""
    model.zero_grad(set_to_none=True)
    items = torch.tensor(sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches))
    for batch in batches:
        loss = model(**batch, num_items_in_batch=items).loss
        loss.backward() if engine is None else engine.backward(loss)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("way", PREPARE)
def test_every_arrangement_has_the_plain_gradient_in_every_way(way: str, attention: str) -> None:
    model = PREPARE[way](build(attention))
    kind = torch.autocast("cpu", dtype=torch.bfloat16) if "autocast" in way else contextlib.nullcontext()
    steps = [[make_batch(*which)] for which in SOME]
    if way == "accumulation":
        steps = [[*one, *other] for one, other in zip(steps, [*steps[1:], steps[0]], strict=True)]
    with kind:
        expected = [accumulate(model, None, batches) for batches in steps]
        with sbp.attach(model, sbp.make_policy("lossless", verify="never")) as engine:
            found = [accumulate(model, engine, batches) for batches in steps]
            assert "skipped" in engine.notes["packing"]
    wrong = {
        str(which): difference
        for which, one, other in zip(SOME, expected, found, strict=True)
        if not (difference := error(one, other)) < (2e-2 if "autocast" in way else LIMIT)  # bfloat16 has 8 bits
    }
    assert wrong == {}


@pytest.mark.compiles
@pytest.mark.parametrize("attention", ATTENTION)
def test_a_compiled_model_has_the_plain_gradient(attention: str) -> None:
    model = build(attention)
    compiled: Any = torch.compile(model, backend="eager")
    for which in FEW:
        batch = make_batch(*which)
        expected = accumulate(model, None, [batch])
        with sbp.attach(compiled, sbp.make_policy("lossless", verify="never")) as engine:
            model.zero_grad()
            engine.backward(compiled(**batch).loss)
            assert error(expected, [p.grad for p in model.parameters() if p.grad is not None]) < LIMIT, which


@pytest.mark.always("before")
@pytest.mark.parametrize("wrapped", ["before", "after"])
def test_two_processes_average_what_they_average_without_packing(wrapped: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.backward.packing.test_cross", str(tmp_path / "meeting"), wrapped]
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    shown = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(shown)
    assert all(f"{2 * len(SOME)} steps agree" in text for text in shown), shown


def _run_rank(meeting: str, wrapped: str, rank: int) -> None:
    """Compare the averaged gradients of two processes with and without packing; each has its own examples."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    agree = 0
    for attention in ATTENTION:
        model = build(attention)
        plain = nn.parallel.DistributedDataParallel(build(attention))
        policy = sbp.make_policy("lossless", verify="never")
        if wrapped == "before":
            packed = nn.parallel.DistributedDataParallel(model)
            engine = sbp.attach(packed, policy)
        else:
            engine = sbp.attach(model, policy)
            packed = nn.parallel.DistributedDataParallel(model)
        for which in SOME:
            batch = {name: tensor[:4] if rank else tensor[2:] for name, tensor in make_batch(*which).items()}
            plain(**batch).loss.backward()
            engine.backward(packed(**batch).loss)
            expected, found = ([p.grad for p in one.parameters()] for one in (plain.module, model))
            difference = error(expected, found)
            assert difference < LIMIT, (attention, which, difference)
            agree += 1
            for one in (plain, packed):
                one.zero_grad(set_to_none=True)
        engine.detach()
    print(f"{agree} steps agree", flush=True)


if __name__ == "__main__":
    _run_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    import os

    os._exit(0)  # destroying a group of gloo may abort or hang (torch 2.13)
