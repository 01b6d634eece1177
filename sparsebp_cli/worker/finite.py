"""Numbers that are not finite end a run with the place they were found at; no update is made of them, no checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from sparsebp_cli.errors import DivergedError
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.sharding import own_part


def finite_loss(value: float, step: int) -> float:
    """Return a loss that is finite.

    Args:
        value: Of all ranks together.
        step: From 1.

    Returns:
        The value.

    Raises:
        DivergedError: It is infinite or not a number.
    """
    if not math.isfinite(value):
        raise DivergedError(f"the loss is {value} at step {step}; nothing was updated")
    return value


def finite_norm(value: float, model: nn.Module, step: int) -> float:
    """Return a gradient norm that is finite.

    Args:
        value: Over all gradients.
        model: Holds them: the first bad one is named.
        step: From 1.

    Returns:
        The value.

    Raises:
        DivergedError: It is infinite or not a number.
    """
    if not math.isfinite(value):
        gradients = ((name, own_part(p.grad)) for name, p in model.named_parameters() if p.grad is not None)
        bad = (name for name, gradient in gradients if not gradient.isfinite().all())
        raise DivergedError(
            f"the gradient norm is {value} at step {step}, first in {next(bad, 'the sum')}; nothing was updated"
        )
    return value


def finite_result(value: float, step: int) -> None:
    """Refuse a model whose held-out loss is no number: what it computes overflows, whatever its weights are.

    Args:
        value: The held-out loss.
        step: The last one.

    Raises:
        DivergedError: It is infinite or not a number.
    """
    if not math.isfinite(value):
        raise DivergedError(f"the held-out loss is {value} after the last step, {step}; no model was saved")


def finite_state(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, step: int, ranks: Ranks | None = None
) -> None:
    """Look at what an update has left, before it counts as a checkpoint or a result.

    One largest magnitude is taken of all tensors together, on their device: a fused reduction that reads each value
    once, and one number that is waited for.

    Args:
        parameters: Trained ones, by name.
        optimizer: Their state.
        step: That made the update, from 1.
        ranks: Every one of them must ask; None: this process is alone.

    Raises:
        DivergedError: A parameter or a tensor of the optimizer's state holds a value that is infinite or not a number.
    """
    tensors = dict(parameters) | dict(_state_tensors(parameters, optimizer))
    is_bad = not _are_finite(tensors.values())
    if not (ranks or Ranks()).highest([float(is_bad)])[0]:
        return
    first = next((name for name, tensor in tensors.items() if not _are_finite([tensor])), "a part of another process")
    raise DivergedError(
        f"the update of step {step} left values that are not finite, first in {first}; they are in no checkpoint"
    )


def _state_tensors(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield f"{key} of {names.get(id(parameter), 'the optimizer')}", value


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    parts = [own_part(tensor.detach()) for tensor in tensors]
    wide = [part for part in parts if part.is_floating_point() and part.element_size() > 1 and part.numel()]
    return math.isfinite(float(torch.nn.utils.get_total_norm(wide, math.inf)))  # no number comes through a maximum
