"""Offloading of the optimizer's state to CPU memory for parameters that are not trained at a step."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn


@final
class OffloadedState:
    """Moves an optimizer's state to the CPU and back, by parameter.

    The host waits for each copy, since between two steps no other work could overlap with it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._homes: dict[nn.Parameter, dict[str, torch.device]] = {}

    def send(self, parameter: nn.Parameter) -> None:
        """Move the state of a parameter to the CPU. Tensors on the CPU, such as Adam's step number, stay there."""
        state = self._optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and (copy := to_host(value)) is not value:
                self._homes.setdefault(parameter, {})[name] = value.device
                state[name] = copy

    def bring(self, parameter: nn.Parameter) -> None:
        """Move the state of a parameter back to its device."""
        state = self._optimizer.state.get(parameter, {})
        for name, device in self._homes.pop(parameter, {}).items():
            if name in state:
                state[name] = to_device(state[name], device)

    def bring_all(self) -> None:
        """Move all states back to their devices."""
        for parameter in list(self._homes):
            self.bring(parameter)


def to_host(value: Tensor) -> Tensor:
    """Return a copy in CPU memory, pinned if there is a GPU; return the tensor itself if it is on the CPU."""
    if value.device.type == "cpu":
        return value
    return torch.empty_like(value, device="cpu", pin_memory=torch.cuda.is_available()).copy_(value)


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device; return the tensor itself if it is there, as after the optimizer's load_state_dict."""
    return value.to(device)
