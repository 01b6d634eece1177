"""Check losses, gradients and weights before they reach an update or a checkpoint: they must be finite (else
DivergedError), and all ranks must have the same gradients (else RunFailedError)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from sparsebp_cli.errors import DivergedError, RunFailedError
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.sharding import local_part

# Tolerance between norms of one summed gradient on two kinds of machines, which add in different orders.
UNEQUAL = 1e-3


def check_loss(value: float, step: int) -> float:
    """Return the loss of all ranks. Raise DivergedError if it is not finite."""
    if not math.isfinite(value):
        raise DivergedError(f"the loss is {value} at step {step}; nothing was updated")
    return value


def check_norm(value: float, model: nn.Module, step: int) -> float:
    """Return the gradient norm. Raise DivergedError if it is not finite, naming the first such parameter."""
    if not math.isfinite(value):
        gradients = ((name, local_part(p.grad)) for name, p in model.named_parameters() if p.grad is not None)
        bad = (name for name, gradient in gradients if not gradient.isfinite().all())
        raise DivergedError(
            f"the gradient norm is {value} at step {step}, first in {next(bad, 'the sum')}; nothing was updated"
        )
    return value


def check_summed(norm: float, mean: float, step: int) -> None:
    """Raise RunFailedError if this rank's gradient norm differs from the mean of all ranks. Ranks that do not sum their
    gradients train separate models, and the losses alone would not show it."""
    if abs(norm - mean) > UNEQUAL * mean:
        raise RunFailedError(
            f"the processes have different gradients at step {step} (a norm of {norm:.6g} here, {mean:.6g} on "
            "average), so they were not summed; nothing was updated. This is an error of SparseBP or of a policy: "
            "please report it"
        )


def check_result(value: float, step: int) -> None:
    """Raise DivergedError if the held-out loss after the last step is not finite. The weights may be finite while the
    model's arithmetic overflows."""
    if not math.isfinite(value):
        raise DivergedError(f"the held-out loss is {value} after the last step, {step}; no model was saved")


def check_state(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, step: int, ranks: Ranks | None = None
) -> None:
    """Raise DivergedError if a trained parameter or a tensor of the optimizer's state is not finite. One fused
    reduction finds the largest magnitude of all tensors on their device, so each value is read once and the host waits
    once."""
    tensors = dict(parameters) | dict(_state_tensors(parameters, optimizer))
    is_bad = not _are_finite(tensors.values())
    if not (ranks or Ranks()).all_max([float(is_bad)])[0]:
        return
    first = next((name for name, tensor in tensors.items() if not _are_finite([tensor])), "a part of another process")
    raise DivergedError(
        f"the update of step {step} made values that are not finite, first in {first}; no checkpoint contains them"
    )


def _state_tensors(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                yield f"{key} of {names.get(id(parameter), 'the optimizer')}", value


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    parts = [local_part(tensor.detach()) for tensor in tensors]
    # PyTorch has no norm of float8, and no largest entry of an empty tensor.
    wide = [part for part in parts if part.is_floating_point() and part.element_size() > 1 and part.numel()]
    return math.isfinite(float(torch.nn.utils.get_total_norm(wide, math.inf)))  # a maximum propagates NaN
