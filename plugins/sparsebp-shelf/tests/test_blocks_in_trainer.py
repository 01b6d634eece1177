"""Residual blocks are dropped in a user's own Trainer, once for all micro-batches of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

import sparsebp_cli as sbp
from sparsebp_cli.policy import Step
from sparsebp_shelf.block import BlockDropper
from sparsebp_shelf.block.layout import find_blocks
from tests.trainer.conftest import Make, door, make_arguments, make_examples, make_model

__all__ = ["door"]  # a fixture


def test_a_trainer_moves_what_is_not_dropped_at_some_step(door: Make, tmp_path: Path) -> None:
    model: Any = make_model()
    policy = sbp.make_policy("dropbp", keep=0.5)
    assert isinstance(policy, BlockDropper)
    arguments = make_arguments(tmp_path, max_steps=1, gradient_accumulation_steps=2, weight_decay=0.5)
    trainer = door(Trainer, policy, {}, model=model, args=arguments, train_dataset=make_examples())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    blocks, _ = find_blocks(model, "the test")
    dropped = policy.drop(blocks, Step(0, seed=arguments.seed, num_steps=1))
    assert dropped
    for name, parameter in model.named_parameters():
        if "proj" in name:
            still = torch.equal(parameter, before[name])
            assert still == any(name.startswith(f"{block}.") for block in dropped), name
