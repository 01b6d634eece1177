"""Optimizer state in the precision in which it was saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def keep_precision(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Restore the saved precision after ``load_state_dict``, which casts all state to the dtype of the weights."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in state_dict["state"].items():
        parameter = parameters[number]
        state = optimizer.state[parameter]
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dtype != state[name].dtype:
                state[name] = value.to(state[name].device, copy=True)
