"""Schedules of the learning rate, by transformers' names and to the last bit with its numbers.

They are written here since ``transformers.optimization`` imports peft, and peft bitsandbytes (transformers 5.17): more
than a second at the start of every run, most of which use neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import TrainingSection

LAST_RATE = 1e-7  # of the schedule polynomial
Share = Callable[..., float]


def build_schedule(section: TrainingSection, optimizer: Optimizer) -> LRScheduler:
    """Make the recipe's learning-rate schedule over ``max_steps``, to be stepped once after every optimizer step. Raise
    DataError if it ends above the recipe's rate."""
    name, rate = section.lr_scheduler_type, section.learning_rate
    if name == "polynomial" and rate <= LAST_RATE:
        raise DataError(f"training.learning_rate: {rate} is not above {LAST_RATE}, at which the schedule {name} ends")
    share = partial(_SHARES[name], warmup=section.num_warmup_steps, steps=section.max_steps, rate=rate)
    return LambdaLR(optimizer, share)


def _rising(falling: Share) -> Share:
    """Return a schedule that rises from 0 over the warm-up, and then is ``falling``."""

    def share(step: int, *, warmup: int, steps: int, rate: float) -> float:
        return step / max(1, warmup) if step < warmup else falling(step, warmup=warmup, steps=steps, rate=rate)

    return share


def _progress(step: int, warmup: int, steps: int) -> float:
    return (step - warmup) / max(1, steps - warmup)


def _constant(_: int, **__: float) -> float:
    return 1.0


def _linear(step: int, *, warmup: int, steps: int, **_: float) -> float:
    return max(0.0, (steps - step) / max(1, steps - warmup))


def _cosine(step: int, *, warmup: int, steps: int, **_: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup, steps))))


def _cosine_to_zero(step: int, *, warmup: int, steps: int, **_: float) -> float:
    """One restart of the cosine, as transformers has it where none is asked for: afterwards the rate stays 0."""
    progress = _progress(step, warmup, steps)
    return 0.0 if progress >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def _polynomial(step: int, *, warmup: int, steps: int, rate: float) -> float:
    """Of degree 1, down to :data:`LAST_RATE`."""
    if step > steps:
        return LAST_RATE / rate
    rest = 1 - (step - warmup) / (steps - warmup)
    return ((rate - LAST_RATE) * rest + LAST_RATE) / rate


def _inverse_sqrt(step: int, *, warmup: int, **_: float) -> float:
    scale = warmup or 10_000
    return 1.0 / math.sqrt((step + scale - warmup) / scale)


_SHARES: dict[str, Share] = {
    "constant": _constant,
    "constant_with_warmup": _rising(_constant),
    "linear": _rising(_linear),
    "cosine": _rising(_cosine),
    "cosine_with_restarts": _rising(_cosine_to_zero),
    "polynomial": _rising(_polynomial),
    "inverse_sqrt": _rising(_inverse_sqrt),
}
