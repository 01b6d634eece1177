"""No door through which a policy trains gathers anything over steps of changing shapes: those of a Trainer, of a script
that was not changed, and of accelerate; the worker's own is tested where its recipes are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback, TrainingArguments

import sparsebp_cli as sbp
from sparsebp_audit.auditor.script_packing import ScriptPacking
from tests.backward.conftest import tiny_model

from .flat import ROUND, ROWS, batch, gathered
from .test_flat import grown

AT = (3 * ROUND, 5 * ROUND)
Policy = Mapping[str, Any]
Train = Callable[[Path, Policy, Sequence[int]], list[dict[str, int]]]


class _Counts(TrainerCallback):
    def __init__(self, at: Sequence[int]) -> None:
        self.at, self.found = at, list[dict[str, int]]()

    def on_step_end(self, _: object, state: Any, *args: object, **kwargs: object) -> None:
        if state.global_step in self.at:
            self.found.append(gathered())


class _Batches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        whole = batch(1 + number // ROWS)
        return {name: tensor[number % ROWS] for name, tensor in whole.items()}


def _arguments(folder: Path, steps: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )


def _trainer(folder: Path, policy: Policy, at: Sequence[int]) -> list[dict[str, int]]:
    counts = _Counts(at)
    made: Any = sbp.PolicyTrainer(
        policies=[policy],
        model=tiny_model("llama"),
        args=_arguments(folder, at[-1]),
        train_dataset=_Batches(),
        callbacks=[counts],
    )
    made.train()
    return counts.found


def _callback(folder: Path, policy: Policy, at: Sequence[int]) -> list[dict[str, int]]:
    counts = _Counts(at)
    arguments = _arguments(folder, at[-1])
    made = Trainer(model=tiny_model("llama"), args=arguments, train_dataset=_Batches(), callbacks=[counts])
    sbp.PolicyCallback([policy]).join(made)
    made.train()
    return counts.found


def _accelerate(_: Path, policy: Policy, at: Sequence[int]) -> list[dict[str, int]]:
    accelerator = Accelerator(cpu=True)
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    with sbp.attach(model, policy, optimizer=optimizer) as engine:
        for number in range(1, at[-1] + 1):
            engine.backward(model(**batch(number)).loss, accelerator.backward)
            optimizer.step()
            optimizer.zero_grad()
            if number in at:
                found.append(gathered())
    return found


def _script(_: Path, policy: Policy, at: Sequence[int]) -> list[dict[str, int]]:
    """``sparsebp audit --apply`` packs a script's own batches, whatever the policy here."""
    del policy
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    packing = ScriptPacking(model)
    packing.install()
    packing.enabled = True
    found = []
    for number in range(1, at[-1] + 1):
        model(**batch(number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in at:
            found.append(gathered())
    assert packing.counts.batches == at[-1]
    packing.remove()
    return found


LOSSLESS: dict[str, Any] = {"name": "lossless"}
ROWS_KEPT: dict[str, Any] = {"name": "topk", "keep": 0.5, "along": "rows"}
CASES = [(train, policy) for train in (_trainer, _callback, _accelerate) for policy in (LOSSLESS, ROWS_KEPT)]


def _name(one: Any) -> str:
    return str(one["name"] if isinstance(one, dict) else one.__name__)


DOORS = pytest.mark.parametrize(("train", "policy"), [*CASES, (_script, LOSSLESS)], ids=_name)


@pytest.mark.promise("R34")
@pytest.mark.always("_trainer-lossless", "_callback-topk", "_accelerate-lossless", "_script-lossless")
@DOORS
def test_no_door_gathers_anything_over_steps_of_changing_shapes(tmp_path: Path, train: Train, policy: Policy) -> None:
    middle, last = train(tmp_path, policy, AT)
    assert grown(middle, last) == {}


@pytest.mark.long
@pytest.mark.promise("R34")
@DOORS
def test_no_door_gathers_anything_over_500_steps(tmp_path: Path, train: Train, policy: Policy) -> None:
    middle, last = train(tmp_path, policy, (10 * ROUND, 125 * ROUND))
    assert grown(middle, last) == {}
