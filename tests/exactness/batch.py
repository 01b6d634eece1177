"""Batches of tokens with labels, padding, position numbers and prefixes as a case wants them.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from tests.exactness.axis import AXES, Case

IGNORED, HIGHEST, VOCABULARY = -100, 60, 60  # numbers of positions and tokens that every tiny model has
Batch = dict[str, Any]
DRAWN = ("labels", "padding", "positions", "prefixes")


def make_batches(case: Case, seed: int, number: int) -> list[Batch]:
    """Return the batches of a run."""
    made, rng = [], random.Random(seed)
    size = None
    for index in range(number):
        facts = dict(case)
        if case["order"] == "plain first" and index < number - 1:
            facts |= {axis: AXES[axis][0] for axis in DRAWN} | {"padding": "right"}
            facts |= {"padding": "none"} if case["positions"] == "restarting" or case["size"] == "one token" else {}
        if case["order"] == "drawn" and index:
            facts |= {axis: rng.choice(AXES[axis]) for axis in DRAWN}
            facts |= {"padding": "none"} if facts["positions"] == "restarting" or case["size"] == "one token" else {}
        size = size or _draw_size(case["size"], rng)
        made.append(make_batch(facts, rng.randrange(2**31), size))
    return made


def _draw_size(name: str, rng: random.Random) -> tuple[int, int]:
    if name == "one token":
        return rng.randint(1, 3), 1
    if name == "one row":
        return 1, rng.randint(17, 32)
    return (rng.randint(3, 5), rng.randint(36, 52)) if name == "long" else (rng.randint(2, 4), rng.randint(20, 32))


def make_batch(facts: Case, seed: int, size: tuple[int, int]) -> Batch:
    """Return one batch, its arguments by name."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, size, generator=generator)
    _share(ids, facts["prefixes"], rng)
    real = _draw_real(facts["padding"], size, rng)
    labels = _draw_labels(facts["labels"], ids, real, rng, generator)
    batch: Batch = {"input_ids": ids.masked_fill(~real, 0), "labels": labels}
    if facts["padding"] != "none":
        batch["attention_mask"] = real.to(rng.choice((torch.long, torch.long, torch.bool)))
    positions = _draw_positions(facts["positions"], real, rng)
    if positions is not None:
        batch["position_ids"] = positions
    if facts["positions"] == "restarting":
        batch["use_cache"] = False  # transformers separates texts of a row only without a cache
    return batch


def _share(ids: Tensor, name: str, rng: random.Random) -> None:
    rows, length = ids.shape
    if name == "none" or length < 18:
        return
    shared = rng.randint(16, length - 1)
    ids[:, :shared] = ids[:1, :shared].clone()
    if name == "nested" and rows > 2:
        longer = rng.randint(shared, length)
        ids[1:3, :longer] = ids[1:2, :longer].clone()
    if name == "copies":
        ids[-1] = ids[0]


def _draw_real(name: str, size: tuple[int, int], rng: random.Random) -> Tensor:
    rows, length = size
    real = torch.ones(size, dtype=torch.bool)
    for row in real:
        left, right = rng.randint(0, length // 3), rng.randint(0, length // 2)
        if name in ("left", "both"):
            row[:left] = False
        if name in ("right", "both", "an empty row"):
            row[length - right :] = False
        if name == "holes":
            start = rng.randint(2, max(2, length - 4))
            row[start : start + rng.randint(1, 2)] = False
    if name == "an empty row" and rows > 1:
        real[rng.randrange(rows)] = False
    return real


def _draw_labels(name: str, ids: Tensor, real: Tensor, rng: random.Random, generator: torch.Generator) -> Tensor:
    labels, (rows, length) = ids.clone(), ids.shape
    if name == "others":
        labels = torch.randint(3, VOCABULARY, ids.shape, generator=generator)
    if name == "shifted":
        labels = ids.roll(rng.choice((1, 2, -1)), 1)
    if name == "completion":
        for row in labels:
            row[: rng.randint(0, length - 1)] = IGNORED
    if name == "scattered":
        labels[torch.rand(ids.shape, generator=generator) < 0.7] = IGNORED
    if name == "one column":
        column = rng.randrange(length)
        labels[:, :column] = labels[:, column + 1 :] = IGNORED
    if name == "an unlabelled row":
        labels[rng.randrange(rows)] = IGNORED
    return labels if name == "padding too" else labels.masked_fill(~real, IGNORED)


def _draw_positions(name: str, real: Tensor, rng: random.Random) -> Tensor | None:  # noqa: PLR0911 - a table
    rows, length = real.shape
    columns = torch.arange(length).repeat(rows, 1)
    if name == "counted":
        return (real.long().cumsum(1) - 1).clamp(min=0)
    if name == "columns":
        return columns[: rng.choice((1, rows))]
    if name == "shifted":
        return columns + torch.tensor([[rng.randint(0, HIGHEST - length)] for _ in range(rows)])
    if name == "jumping":
        return torch.tensor([sorted(rng.sample(range(HIGHEST), length)) for _ in range(rows)])
    if name == "shuffled":
        return torch.tensor([rng.sample(range(length), length) for _ in range(rows)])
    if name == "restarting":
        for row in columns:
            for start in sorted(rng.sample(range(1, length), min(rng.randint(1, 3), length - 1))):
                row[start:] = torch.arange(length - start)
        return columns
    return None
