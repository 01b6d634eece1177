"""Batches of the coming step are prepared while a GPU computes, and a run is the same with and without that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.worker import batch as batches
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.data import EncodedExample
from sparsebp_cli.worker.prefetch import BatchPrefetch
from sparsebp_cli.worker.training import Training
from tests.worker.ranks import make_run, train_alone

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class LoggedOrder(BatchOrder):
    """An order that notes which micro-batches are collated."""

    collated: list[int]

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        self.collated.append(number)
        return super().__getitem__(number)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is copied to a device, which is the host in truth."""
    calls: list[str] = []

    def copy(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        if isinstance(batch, batches.CopiedBatch):
            return batch.copies
        calls.append(device.type)
        return dict(batch)

    monkeypatch.setattr(batches, "to_device", copy)
    return calls


def make_order() -> LoggedOrder:
    examples = [EncodedExample(np.full(8, n), np.full(8, n), n, {}) for n in range(20)]
    order = LoggedOrder(examples, 2, 0, 0)
    order.collated = []
    return order


def test_each_batch_is_collated_once_and_before_its_step(copied: list[str]) -> None:
    order, plain = make_order(), make_order()
    prefetch = BatchPrefetch(order, CUDA, 6)
    assert len(prefetch.take([0, 1])) == 2
    prefetch.prepare([2, 3])
    assert (order.collated, copied) == ([0, 1, 2, 3], ["cuda", "cuda"])
    for (taken, targets), number in zip(prefetch.take([2, 3]), (2, 3), strict=True):
        expected, num_expected = plain.rank_part(number)
        assert targets == num_expected
        assert all(torch.equal(taken[name], expected[name]) for name in expected)
        assert all(torch.equal(batches.to_device(taken, CUDA)[name], expected[name]) for name in expected)
    assert order.collated == [0, 1, 2, 3]
    prefetch.prepare([6, 7])  # there is no such step
    assert (order.collated, len(copied)) == ([0, 1, 2, 3], 2)


def test_what_is_not_taken_next_is_dropped(copied: list[str]) -> None:
    order = make_order()
    prefetch = BatchPrefetch(order, CUDA, 10)
    prefetch.prepare([3])
    prefetch.take([7])
    prefetch.take([3])
    assert order.collated == [3, 7, 3]
    assert copied == ["cuda"]


def test_nothing_is_prepared_on_a_cpu() -> None:
    order = make_order()
    BatchPrefetch(order, CPU, 9).prepare([0])
    assert order.collated == []


@pytest.fixture
def preparing(monkeypatch: pytest.MonkeyPatch, copied: list[str]) -> list[str]:
    """Trainings prepare as on CUDA; returns what they do, in order."""
    calls: list[str] = []

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return run

    build = Training.build.__func__  # type: ignore[attr-defined]

    def build_logged(cls: type[Training], *args: Any) -> Training:
        training: Training = build(cls, *args)
        training.batches._device = CUDA
        for name, thing, method in (
            ("collate", training.order, "rank_part"),
            ("backward", training.engine, "backward"),
            ("update", training.optimizer, "step"),
        ):
            monkeypatch.setattr(thing, method, wrap(name, getattr(thing, method)))
        monkeypatch.setattr(training, "_check", wrap("wait", training._check))
        return training

    monkeypatch.setattr(Training, "build", classmethod(build_logged))
    return calls


def weights(run: RunFolder) -> dict[str, Tensor]:
    return load_file(run.path / "model" / "model.safetensors")


def test_a_run_that_prepares_is_the_same_and_resumes_at_its_step(
    tiny_recipe: Callable[..., Recipe], tmp_path: Path, preparing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, Any] = {"training": {"max_steps": 4, "gradient_accumulation_steps": 2}}
    sections |= {"measure": {"eval_every": 4}, "checkpoint": {"every": 2}}
    run = make_run(tiny_recipe(**sections), tmp_path)
    train_alone([run])
    first = ["collate", "collate", "backward", "backward", "collate", "collate", "wait", "update"]
    assert preparing[:8] == first
    assert preparing[8:14] == first[2:]  # its batches are there
    assert preparing[-4:] == ["backward", "backward", "wait", "update"]  # after the last step there is none

    stopped = make_run(tiny_recipe(**sections | {"checkpoint": {"every": 2, "stop_at": 2}}), tmp_path)
    train_alone([stopped])
    plan = stopped.read_plan()
    assert plan["recipe"]["checkpoint"]["stop_at"] == 2
    monkeypatch.setattr(Training, "is_paused", False)
    preparing.clear()
    train_alone([stopped])
    assert preparing[:8] == first  # what was prepared before the stop is collated again
    monkeypatch.undo()
    plain = make_run(tiny_recipe(**sections), tmp_path)
    train_alone([plain])
    for other in (run, stopped):
        assert all(torch.equal(tensor, weights(plain)[name]) for name, tensor in weights(other).items())
        assert History.load(other.path).series("train/loss") == History.load(plain.path).series("train/loss")
