"""``python -m tests.gpu.waits``: what each policy waits for in a forward and a backward on a fake GPU, as JSON."""

from __future__ import annotations

if __name__ == "__main__":
    from benchmarks.fake_gpu import guard

    guard.load()  # before torch

import json
import logging
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from benchmarks.fake_gpu.device import fake_cuda
from sparsebp_cli.backward.kind.packing import varlen
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.data import EncodedExample
from sparsebp_cli.worker.prefetch import BatchPrefetch
from sparsebp_cli.worker.price import StepPrice
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.training import Training

SIZE: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
# Policy, its options, those of attach.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("", {}, {}),
    "dense": ("dense", {}, {}),
    **{
        f"topk {along}": ("topk", {"keep": 0.25, "along": along}, {})
        for along in ("rows", "columns", "blocks", "elements")
    },
    "topk 2:4": ("topk", {"keep": 0.5, "along": "2:4"}, {}),
    **{f"random {along}": ("random", {"keep": 0.25, "along": along}, {}) for along in ("rows", "columns", "blocks")},
    "crs": ("crs", {"keep": 0.25}, {}),
    "mvue": ("mvue", {"products": "both"}, {}),
    "vcas": ("vcas", {}, {}),
    "dropbp": ("dropbp", {"keep": 0.5}, {}),
    "dropbp by sensitivity": ("dropbp", {"keep": 0.5, "sensitivity_at": 0.5}, {"num_steps": 10}),
    "grades": ("grades", {"threshold": 1.0, "grace": 0.0}, {"num_steps": 10}),
    "wta-crs": ("wta-crs", {"keep": 0.25}, {}),
    "gact": ("gact", {"bits": 4}, {}),
    "velora": ("velora", {}, {}),
    "dither": ("dither", {}, {}),
    "tokens detach": ("tokens", {"keep": 0.25, "score": "random", "mode": "detach"}, {}),
    "tokens exact": ("tokens", {"keep": 0.25, "score": "random", "mode": "exact"}, {}),
    "tokens by loss": ("tokens", {"keep": 0.25, "score": "loss", "mode": "detach"}, {}),
    "selective-backprop": ("selective-backprop", {"keep": 0.5, "start": 0.0}, {"num_steps": 10}),
    "uniform": ("uniform", {"keep": 0.5, "start": 0.0}, {"num_steps": 10}),
    "frozen": ("frozen", {"freeze": ["model.embed_tokens"]}, {}),
    "segments": ("dense", {}, {"segments": 2}),
    "lossless": ("lossless", {"verify": "never", "prefixes": "separate"}, {}),
    "lossless in bfloat16": ("lossless", {"verify": "never", "prefixes": "separate"}, {}),  # by the flash kernel
}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a llama on the fake device."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZE)).train()
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="cuda"))
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
    return model


def count(name: str) -> dict[str, int]:
    """Return the waits of one step, without those of the plain model."""
    policy, options, ways = CASES[name]
    # The fake device has no values to compare in the small case that the kernel has to pass.
    with fake_cuda() as found, patch.object(varlen, "is_right", lambda *_: True):
        model = make_model(torch.bfloat16 if "bfloat16" in name else torch.float32)
        ids = torch.empty(4, 64, dtype=torch.long, device="cuda")
        if policy:
            ways = {"optimizer": torch.optim.AdamW(model.parameters())} | ways
            engine = sbp.attach(model, sbp.make_policy(policy, **options), **ways)
            for _ in range(2):  # the first step may prepare
                found.clear()
                engine.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        else:
            found.clear()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return dict(found)


WORKER = "the worker's step"


def count_step() -> dict[str, int]:
    """Return the waits of the worker's step of two micro-batches, with what surrounds it left out."""
    recipe = Recipe.model_validate(
        {
            "version": 1,
            "name": "step",
            "model": {"config": {"model_type": "llama"}, "tokenizer": "none"},
            "dataset": {"name": "austen"},
            "training": {"max_steps": 9, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        }
    )
    ids = np.ones(64, dtype=np.int64)
    examples = [EncodedExample(ids, ids, 0, {}) for _ in range(16)]
    with fake_cuda() as found:
        model: Any = make_model()
        model.config.use_cache = False  # as the worker builds it
        training = object.__new__(Training)
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        training.plan, training.ranks, training.step, training.tokens = Plan(recipe=recipe), Ranks(), 0, 0
        training.model = training.bare = model
        training.engine = sbp.attach(model, sbp.make_policy("topk", keep=0.25), optimizer=optimizer)
        training.order = BatchOrder(examples, 4, 0, 0)
        training.batches = BatchPrefetch(training.order, torch.device("cuda"), 18)
        training.compiled, training.price = None, StepPrice()
        stand_in: Any = SimpleNamespace
        training.optimizer, training.schedule = cast("Any", optimizer), schedule
        device = torch.device("cuda")
        training.accelerator = stand_in(device=device, backward=lambda loss: loss.backward())
        training.measurement = stand_in(peak=stand_in(device=device, bytes=lambda: 0))
        training.policies = ()
        for _ in range(2):  # the first step creates the optimizer's state
            found.clear()
            training._train_step()
    return dict(found)


def main(names: list[str]) -> None:
    """Print the waits of these cases, by default of all."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in names or (*CASES, WORKER):
        try:
            found[name] = count_step() if name == WORKER else count(name)
        except Exception as error:  # all are told together
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads of the stand-in device may still run, and the C++ library aborts if they outlive it
