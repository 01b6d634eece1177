"""Build a recipe's optimizer and learning-rate schedule, and clip its gradient."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from sparsebp_cli.errors import DataError, did_you_mean
from sparsebp_cli.policy.composition import find_optimizer
from sparsebp_cli.recipe.schema import TrainingSection


def load_class(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return an optimizer's class, and the arguments that its name implies. Raise DataError if a package is missing."""
    entry = find_optimizer(name)
    module, _, found = entry.place.partition(":")
    try:
        kind: type[torch.optim.Optimizer] = getattr(import_module(module), found)
    except ImportError as error:
        if entry.extra is None:
            raise
        package, extra = entry.extra
        raise DataError(
            f"training.optim: {name} needs the package {package} ({error}): pip install 'sparsebp[{extra}]'"
        ) from None
    return kind, dict(entry.implied)


def build_optimizer(section: TrainingSection, model: nn.Module | Iterable[Parameter]) -> torch.optim.Optimizer:
    """Build the recipe's optimizer for a model's trained parameters, or for given parameters. Raise DataError if it
    refuses an argument or needs a missing package."""
    kind, arguments = load_class(section.optim)
    known = [name for name in inspect.signature(kind).parameters if name not in {"params", "model", "lr"}]
    for name in section.optim_args:
        if name not in known:
            raise DataError(
                f"training.optim_args.{name}: not an argument of {section.optim}; allowed: "
                f"{', '.join(known)}{did_you_mean(name, known)}"
            )
    arguments |= {k: tuple(v) if isinstance(v, list) else v for k, v in section.optim_args.items()}
    for key in ("weight_decay", "weight_decay_of"):
        if getattr(section, key) is not None and "weight_decay" not in known:
            raise DataError(f"training.{key}: {section.optim} has no weight decay: leave this key out")
    if section.weight_decay is not None:
        arguments["weight_decay"] = section.weight_decay
    trained: Any = model
    takes_model = find_optimizer(section.optim).takes_model
    if isinstance(model, nn.Module) and not takes_model:
        trained = [p for p in model.parameters() if p.requires_grad]
    if section.weight_decay_of == "matrices":
        if takes_model:
            raise DataError(
                f"training.weight_decay_of: {section.optim} decides itself which weights decay: omit the key"
            )
        assert isinstance(model, nn.Module)  # parameters alone have no names
        trained = _part_by_decay(model)
    try:
        return kind(trained, lr=section.learning_rate, **arguments)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise DataError(f"training.optim_args: {section.optim}: {error}") from None


def _part_by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups: those that transformers.Trainer decays, and the others without weight decay."""
    from transformers import Trainer  # slow to import

    decayed = {*Trainer.get_decay_parameter_names(None, model)}  # type: ignore[arg-type]
    named = [(name in decayed, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for decays, p in named if decays]}]
    groups.append({"params": [p for decays, p in named if not decays], "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def clip_gradient(section: TrainingSection, optimizer: torch.optim.Optimizer) -> Tensor:
    """Clip the gradient as a recipe says, and return its norm before clipping."""
    # Use the optimizer's parameters, because a policy may have replaced the model's weights by parts of them.
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    limit = math.inf if section.max_grad_norm is None else section.max_grad_norm
    return torch.nn.utils.clip_grad_norm_(trained, limit)


def build_schedule(section: TrainingSection, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Build the recipe's learning-rate schedule over ``max_steps``. Step it once after every optimizer step."""
    schedule: LRScheduler = get_scheduler(
        section.lr_scheduler_type,
        optimizer,
        num_warmup_steps=section.num_warmup_steps,
        num_training_steps=section.max_steps,
        scheduler_specific_kwargs=section.lr_scheduler_kwargs,
    )
    return schedule
