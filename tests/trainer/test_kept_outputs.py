"""Outputs of frozen layers that are kept in a transformers.Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from sparsebp_cli.trainer import PolicyCallback
from tests.backward.test_kept_outputs import frozen, llama, packed


def _train(folder: Path, **options: Any) -> list[torch.Tensor]:
    batch, model = packed("llama"), llama()
    rows = [{name: column[0] for name, column in batch([row]).items()} for row in range(12)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=7,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)  # type: ignore[arg-type]
    PolicyCallback(frozen("llama", **options)).join(trainer)
    trainer.train()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_trainer_that_keeps_outputs_ends_with_the_same_weights(place: str, tmp_path: Path) -> None:
    plain, kept = _train(tmp_path / "plain"), _train(tmp_path / "kept", cache=place)
    assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=True))
    files = [path for path in (tmp_path / "kept").rglob("kept-outputs/*/*") if path.is_file()]
    assert len(files) == (12 if place == "disk" else 0)
