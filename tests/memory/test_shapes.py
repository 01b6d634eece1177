"""No shape of a batch leaves anything behind: after 500 shapes, no two of them alike, there is what there was before.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

import sparsebp_cli as sbp
from tests.backward.conftest import tiny_model

from .flat import gathered
from .test_flat import grown

NUM_ROWS, NUM_LENGTHS = 10, 50
NUM_SHAPES = NUM_ROWS * NUM_LENGTHS
HALF = NUM_SHAPES // 2
# The first batch comes again where things are counted: what is held of the last batch is the same then.
NUMBERS = [*range(HALF), 0, *range(HALF, NUM_SHAPES), 0]
AT = (HALF + 1, NUM_SHAPES + 2)  # steps


def shape_of(number: int) -> tuple[int, int]:
    """Return the shape (B, T) of batch ``number``, counted from 0: short and long ones in turn."""
    return 1 + number % NUM_ROWS, 6 + (number // NUM_ROWS * 7) % NUM_LENGTHS


def make_batch(number: int) -> dict[str, Tensor]:
    """Return a batch with padding, a shared prefix and positions without a label."""
    shape = shape_of(number)
    ids = torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(number))
    ids[:, : shape[1] // 2] = ids[:1, : shape[1] // 2].clone()
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    labels = ids.masked_fill((mask == 0) | (torch.arange(shape[1]) < 3), -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def count_everything(engine: Any) -> dict[str, int]:
    """Count what lives, and the entries of every container of the engine's extensions, at any depth.

    Functions are left out: caches of Python's abstract classes fill up once. So is the engine itself, which holds the
    last pass.
    """
    seen = {id(engine)}
    entries = sum(_count_entries(vars(extension), seen) for extension in engine.extensions)
    return {name: number for name, number in gathered().items() if name != "callables"} | {"entries": entries}


def _count_entries(value: object, seen: set[int]) -> int:
    if id(value) in seen or isinstance(value, Tensor | torch.nn.Module | str | bytes | type):
        return 0
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner: list[object] = [*value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    else:
        return (
            _count_entries(vars(value), seen)
            if type(value).__module__.startswith("sparsebp_cli") and hasattr(value, "__dict__")
            else 0
        )
    return len(inner) + sum(_count_entries(one, seen) for one in inner)


class _Counts(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[dict[str, int]] = []
        self.trainer: Any = None

    def on_step_end(self, _: object, state: Any, *args: object, **kwargs: object) -> None:
        if state.global_step in AT:
            self.found.append(count_everything(self.trainer.engine))


class _Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, number: int) -> int:
        return NUMBERS[number]


def _by_attach(_: Path) -> tuple[list[dict[str, int]], str]:
    model = tiny_model("llama")
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-4), []
    with sbp.attach(model, "lossless", optimizer=optimizer) as engine:
        for step, number in enumerate(NUMBERS, 1):
            engine.backward(model(**make_batch(number)).loss)
            optimizer.step()
            optimizer.zero_grad()
            if step in AT:
                found.append(count_everything(engine))
        return found, engine.notes["packing"]


def _by_trainer(folder: Path) -> tuple[list[dict[str, int]], str]:
    counts = _Counts()
    options: dict[str, Any] = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
    trainer: Any = sbp.PolicyTrainer(
        policies=["lossless"],
        model=tiny_model("llama"),
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=len(NUMBERS),
            per_device_train_batch_size=1,
            use_cpu=True,
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
            **options,
        ),
        train_dataset=_Numbers(),
        data_collator=lambda numbers: make_batch(numbers[0]),
        callbacks=[counts],
    )
    counts.trainer = trainer
    trainer.train()
    return counts.found, trainer.engine.notes["packing"]


def test_the_shapes_are_500() -> None:
    assert len({shape_of(number) for number in NUMBERS}) == NUM_SHAPES == 500


@pytest.mark.promise("R34")
@pytest.mark.always("_by_attach", "_by_trainer")
@pytest.mark.parametrize("train", [_by_attach, _by_trainer], ids=lambda train: train.__name__)
def test_500_shapes_of_batches_leave_nothing_behind(tmp_path: Path, train: Any) -> None:
    (middle, last), note = train(tmp_path)
    assert grown(middle, last) == {}
    assert int(note.split(" batches")[0].split()[-1]) >= len(NUMBERS)
