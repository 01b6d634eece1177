"""Batches of every arrangement that packing must get right, and the gradient of a step on one of them."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sparsebp_cli as sbp
from sparsebp_cli.backward import Engine

IGNORED = -100
NUM_EXAMPLES, LENGTH, SHARED = 6, 44, 20
PADS, LABELS = ("none", "right", "left"), ("dense", "completion", "last", "scattered")
PREFIXES = ("none", "pairs", "groups", "tree")
ALL = tuple(product(PADS, LABELS, PREFIXES))
# Every two values together, in few batches.
SOME = (
    ("none", "dense", "none"),
    ("none", "completion", "groups"),
    ("none", "last", "tree"),
    ("right", "dense", "pairs"),
    ("right", "completion", "none"),
    ("right", "last", "groups"),
    ("left", "dense", "tree"),
    ("left", "completion", "pairs"),
    ("left", "last", "none"),
    ("right", "completion", "tree"),
    ("right", "scattered", "groups"),
    ("none", "scattered", "tree"),
)
LIMIT = 1e-6  # relative error of the whole gradient in float32; nearly all that was seen is under 6e-7
# A model that rounds more may go beyond it by its own measure: how much plain steps on these examples in another
# order differ.
ROUNDINGS = 8


def make_batch(pad: str, labels: str, prefix: str, vocabulary: int = 60) -> dict[str, Tensor]:
    """Return the arguments of a forward."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, vocabulary, (NUM_EXAMPLES, LENGTH), generator=generator)
    if prefix == "groups":
        ids[:, :SHARED] = ids[:1, :SHARED]
    if prefix == "pairs":
        ids[1::2, :SHARED] = ids[::2, :SHARED]
    if prefix == "tree":
        ids[:, :18] = ids[:1, :18]
        ids[:3, :36] = ids[:1, :36]
        ids[5] = ids[4]
    lengths = torch.tensor([44, 30, 37, 41, 44, 25]) if pad != "none" else torch.full((NUM_EXAMPLES,), LENGTH)
    real = torch.arange(LENGTH) < lengths[:, None]
    if pad == "left":
        real = real.flip(1)
    ids = ids.masked_fill(~real, 0)
    marked = ids.masked_fill(~real, IGNORED)
    if labels == "completion":
        marked[:, :24] = IGNORED
    if labels == "last":
        marked[:, :-6] = IGNORED
        marked[:, -5:] = IGNORED
    if labels == "scattered":
        marked[torch.rand(marked.shape, generator=generator) > 0.3] = IGNORED
        marked[real.cumsum(1) == 1] = IGNORED  # that of a first token would train padding
    return {"input_ids": ids, "attention_mask": real.long(), "labels": marked}


def make_pair_batch(pad: str, labels: str, prefix: str, vocabulary: int = 60) -> dict[str, Tensor]:
    """Return the arguments of a forward of an encoder and a decoder: sources, and labels of other lengths.

    Examples of a group have one source, and the beginning of their labels is the same.
    """
    batch, target = make_batch(pad, "dense", prefix, vocabulary), make_batch("right", labels, prefix, vocabulary)
    if prefix in ("groups", "tree"):
        batch["input_ids"][:3], batch["attention_mask"][:3] = batch["input_ids"][:1], batch["attention_mask"][:1]
    batch["labels"] = target["labels"][:, :40].contiguous()
    batch["labels"][(batch["labels"] == IGNORED).all(1), 3] = 5  # some of these models need one label an example
    return batch


def gradients(model: nn.Module, engine: Engine | None, batch: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the gradients of one step; ``engine`` None: plain."""
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(**batch).loss
    if engine is None:
        loss.backward()
    else:
        engine.backward(loss)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def count_flops(model: nn.Module, engine: Engine | None, batch: dict[str, Any]) -> int:
    """Return the FLOPs of one step by PyTorch's counter; ``engine`` None: plain."""
    with FlopCounterMode(display=False) as counter:
        gradients(model, engine, batch)
    return int(counter.get_total_flops())


def error(expected: list[Tensor], got: list[Tensor]) -> float:
    """Return the relative error of all gradients together."""
    squares = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(expected, got, strict=True))
    return float((squares / sum(float(a.double().square().sum()) for a in expected)) ** 0.5)


def errors(model: nn.Module, arrangements: Any = SOME, make: Any = make_batch, **options: Any) -> dict[str, float]:
    """Return the error of each arrangement whose gradient or loss is not the plain one."""
    batches = {" ".join(which): make(*which) for which in arrangements}
    plain = {name: gradients(model, None, batch) for name, batch in batches.items()}
    wrong = {}
    with sbp.attach(model, sbp.make_policy("lossless", **({"verify": "never"} | options))) as engine:
        for name, batch in batches.items():
            loss, grads = gradients(model, engine, batch)
            difference = max(error(plain[name][1], grads), float(abs(loss / plain[name][0] - 1)))
            if not difference < LIMIT:
                wrong[name] = difference
        assert "skipped" in engine.notes["packing"] if arrangements else True
    for name, difference in list(wrong.items()):
        flipped = {key: value.flip(0) for key, value in batches[name].items()}
        if difference < ROUNDINGS * error(plain[name][1], gradients(model, None, flipped)[1]):
            del wrong[name]
    return wrong
