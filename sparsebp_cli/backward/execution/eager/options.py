"""From the user's words to an eager update, or to the refusal of what it cannot do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sparsebp_cli.backward.execution.eager.clipping import Clipping
from sparsebp_cli.backward.execution.eager.per_parameter_step import SingleStep
from sparsebp_cli.backward.execution.eager.separable import refuse_inseparable
from sparsebp_cli.backward.execution.eager.update import EagerUpdate
from sparsebp_cli.backward.execution.grad_store import GradStore
from sparsebp_cli.errors import UnsupportedError, UsageError


def choose_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    update: str,
    clipping: Clipping,
) -> list[EagerUpdate]:
    """Return who changes parameters inside the backward: nobody, or one.

    Args:
        model: As the user has it: what wraps it shows.
        optimizer: The user's.
        update: ``deferred`` or ``eager``.
        clipping: Of its gradients.

    Returns:
        At most one part of the engine.

    Raises:
        UsageError: The optimizer has no parameter of the model.
        UnsupportedError: What the user has cannot be updated eagerly.
    """
    if update == "deferred":
        return []
    assert optimizer is not None, "the table refuses it"
    part = EagerUpdate(model, optimizer, clipping)
    if set(model.parameters()).isdisjoint(SingleStep(optimizer).parameters):
        raise UsageError(
            f"update='eager': the optimizer has no parameter of {type(model).__name__}: make it of model.parameters() "
            "as they are now"
        )
    refuse_inseparable(optimizer)
    return [part]


def refuse_scaling(backward: Callable[..., object] | None) -> None:
    """Refuse what multiplies the loss, and would divide gradients by as much when they are no longer there.

    Also what takes the gradients elsewhere, so that none would arrive at a parameter.

    Args:
        backward: What runs a pass, such as ``accelerator.backward``.

    Raises:
        UnsupportedError: It has a scaler, or is a store's.
    """
    owner = getattr(backward, "__self__", None)
    if isinstance(owner, GradStore):
        raise UnsupportedError(
            "update='eager' with the backward of a GradStore: the store takes the gradients that parameters would be "
            "updated by; use update='deferred'"
        )
    if getattr(owner, "scaler", None) is not None:
        raise UnsupportedError(
            "update='eager' with a GradScaler is not built: gradients would be applied before they are scaled back; "
            "use bfloat16, or update='deferred'"
        )
