"""From the user's words to an eager update, or to the refusal of what it cannot do."""

from __future__ import annotations

import torch
from torch import nn

from sparsebp_cli.backward.execution.eager.clipping import Clipping
from sparsebp_cli.backward.execution.eager.per_parameter_step import PerParameterStep
from sparsebp_cli.backward.execution.eager.separable import refuse_inseparable
from sparsebp_cli.backward.execution.eager.update import EagerUpdate
from sparsebp_cli.errors import UsageError


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
    if set(model.parameters()).isdisjoint(PerParameterStep(optimizer).parameters):
        raise UsageError(
            f"update='eager': the optimizer has no parameter of {type(model).__name__}: make it of model.parameters() "
            "as they are now"
        )
    refuse_inseparable(optimizer)
    return [part]
