"""Builds the eager update from the options of ``attach``."""

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
    """Return the extension for ``update='eager'``, or none for ``deferred``.

    ``model`` is as the user has it, so that wrappers are visible. Raises :class:`UsageError` if the optimizer has no
    parameter of the model, and :class:`UnsupportedError` if it cannot update parameters one by one.
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
