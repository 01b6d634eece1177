"""In a trainer with a loss scaler, what policies keep is as without one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sparsebp_cli.trainer import PolicyTrainer

from .conftest import make_arguments, make_examples, make_model


def test_feedback_under_a_scaler_trains_what_it_trains_without(tmp_path: Path) -> None:
    """accelerate makes a scaler on a GPU alone, so this one is put where accelerate puts its own; it would not divide
    gradients by it before they are clipped.
    """
    trained, kept = [], list[dict[str, Tensor]]()
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=3)):
        model, arguments = (
            make_model(),
            make_arguments(tmp_path, gradient_accumulation_steps=2, optim="sgd", max_grad_norm=0.0),
        )
        policy = {"name": "topk", "keep": 0.25, "along": "rows", "error_feedback": True}
        trainer = PolicyTrainer(model=model, args=arguments, train_dataset=make_examples(), policies=[policy])
        trainer.accelerator.scaler = scaler
        trainer.train()
        assert trainer.engine is not None
        kept.append(trainer.engine.state_dict()["cut"])
        trained.append(list(model.parameters()))
    assert scaler is not None
    assert scaler.get_scale() == 4096.0 * 2**4
    for one, two in zip(*trained, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)
    assert kept[0].keys() == kept[1].keys()
    for key, residual in kept[0].items():
        torch.testing.assert_close(kept[1][key], residual, rtol=1e-4, atol=1e-8)
