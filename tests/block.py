"""Models with dropped residual blocks, their gradients, and what is claimed of their backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

import sparsebp_cli as sbp
from sparsebp_cli.backward import ModuleTrace, PassCount, Proof, count_flops, saved_bytes
from sparsebp_cli.backward.observe.flops import DensePass
from sparsebp_shelf.block import BlockDropper
from tests.backward.conftest import tokens


def attach(model: nn.Module, policy: Any, **options: Any) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    return sbp.attach(model, policy, optimizer=optimizer, **{"seed": 1} | options)


def tiny_encoder(family: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "max_position_embeddings": 40, "dim": 32, "hidden_dim": 48, "n_layers": 2}
    config = AutoConfig.for_model(family, **sizes, **more, n_heads=4, pad_token_id=0)
    model: nn.Module = AutoModelForSequenceClassification.from_config(config)
    return model.train()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert torch.equal(gradient, theirs[name]), name


def prove_blocks(model: nn.Module, policy: BlockDropper) -> tuple[Proof, list[str]]:
    ids = tokens(0)
    engine = attach(model, policy)
    extension = next(part for part in engine.extensions if hasattr(part, "parts"))

    def count(backward: Any) -> tuple[PassCount, DensePass]:
        with ModuleTrace(model) as trace, count_flops(trace) as flops:
            with saved_bytes(model.parameters(), trace) as saved:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            backward(loss)
        return PassCount(flops, saved), DensePass(loss, trace, flops)

    with engine, engine.probing():
        engine.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)  # its choice is the one that is claimed
        with engine.disabled():
            dense, graph = count(torch.Tensor.backward)
        claims = [extension.claim(graph)]
        ours, _ = count(engine.backward)
        return Proof.of(model, dense, ours, engine.report(), claims), sorted(extension._dropped)
