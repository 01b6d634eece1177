"""What a model does to examples in one row, by enumeration: forwards alone, and forwards with one example changed.

It knows nothing of the judge: no gradient, no hook, no limit of its own.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.backward.token.test_every_decoder import every_model

LENGTHS = (13, 11, 7)
MOVED = 1e-3  # of the largest logit alone: above it a change is no rounding


@dataclass(frozen=True)
class Enumerated:
    """What was seen in a packed row."""

    difference: float  # of an example's logits from those alone, largest entry, relative
    moves: dict[tuple[int, int], float]  # source and target: how much the target moves when the source changes

    @property
    def is_mixed(self) -> bool:
        """Whether an example is not as if alone."""
        return max(self.difference, *self.moves.values()) > MOVED


def packed_row(seed: int = 0) -> dict[str, Any]:
    """One row as transformers' DataCollatorWithFlattening and Trainer give it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (1, sum(LENGTHS)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": ids, "position_ids": positions, "use_cache": False}


def enumerate_row(model: PreTrainedModel, row: dict[str, Any]) -> Enumerated:
    """Return what a model in evaluation mode does to the examples of a row."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _enumerate(model, row)
    finally:
        model.train(was_training)


def _enumerate(model: Any, row: dict[str, Any]) -> Enumerated:
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).tolist()
    spans = [slice(start, end) for start, end in pairwise(ends)]
    plain, ids = model(**row).logits[0], row["input_ids"]
    alone: list[Tensor] = [model(input_ids=ids[:, span], use_cache=False).logits[0] for span in spans]
    scales = [float(logits.abs().max().clamp(min=1e-6)) for logits in alone]
    difference = max(
        float((plain[span] - logits).abs().max()) / scale
        for span, logits, scale in zip(spans, alone, scales, strict=True)
    )
    moves = {}
    for source, span in enumerate(spans):
        changed = ids.clone()
        changed[:, span] = (ids[:, span] - 3 + 17) % 57 + 3
        moved = model(**row | {"input_ids": changed}).logits[0]
        for target, other in enumerate(spans):
            if target != source:
                moves[source, target] = float((moved[other] - plain[other]).abs().max()) / scales[target]
    return Enumerated(difference, moves)


def every_enlarged_model() -> Iterator[tuple[str, PreTrainedModel]]:
    """Every tiny decoder of the installed transformers, with weights so large that what is mixed shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, model in every_model():
            enlarge(model)
            yield name, model


def enlarge(model: PreTrainedModel) -> None:
    """Add noise to a new model's weights."""
    generator = torch.Generator().manual_seed(random.Random(type(model).__name__).randrange(2**31))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                size = 0.1 if parameter.dim() > 1 else 0.05
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
