"""Optimizers of torch and schedules of transformers, by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from sparsebp_cli.errors import DataError, did_you_mean
from sparsebp_cli.recipe.schema import TrainingSection

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


def build_optimizer(section: TrainingSection, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
    """Make the recipe's optimizer.

    Args:
        section: The recipe's training section.
        parameters: What is trained.

    Returns:
        The optimizer.

    Raises:
        DataError: It has no such argument, or refuses its value.
    """
    optimizer_class = CLASSES[section.optim]
    known = [name for name in inspect.signature(optimizer_class).parameters if name not in {"params", "lr"}]
    for name in section.optim_args:
        if name not in known:
            raise DataError(
                f"training.optim_args.{name}: {section.optim} has {', '.join(known)}{did_you_mean(name, known)}"
            )
    arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in section.optim_args.items()}
    try:
        return optimizer_class(parameters, lr=section.learning_rate, **arguments)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise DataError(f"training.optim_args: {section.optim}: {error}") from None


def build_schedule(section: TrainingSection, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Make the recipe's learning-rate schedule over ``max_steps``.

    Args:
        section: The recipe's training section.
        optimizer: What it drives.

    Returns:
        The schedule, to be stepped once after every optimizer step.
    """
    schedule: LRScheduler = get_scheduler(
        section.lr_scheduler_type,
        optimizer,
        num_warmup_steps=section.warmup_steps,
        num_training_steps=section.max_steps,
    )
    return schedule
