"""The optimizer's state of parameters that are not trained at a step, in the memory of the CPU."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn


@final
class OffloadedState:
    """State of an optimizer that is moved to the CPU and back, by parameter.

    Copies wait for the device: between two steps nothing runs that they could overlap with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._homes: dict[nn.Parameter, dict[str, torch.device]] = {}

    def send(self, parameter: nn.Parameter) -> None:
        """Move the state of a parameter to the CPU. What is there, such as Adam's step number, stays."""
        state = self._optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and (copy := to_host(value)) is not value:
                self._homes.setdefault(parameter, {})[name] = value.device
                state[name] = copy

    def bring(self, parameter: nn.Parameter) -> None:
        """Move the state of a parameter to where it was."""
        state = self._optimizer.state.get(parameter, {})
        for name, device in self._homes.pop(parameter, {}).items():
            if name in state:
                state[name] = to_device(state[name], device)

    def bring_all(self) -> None:
        """Move every state to where it was."""
        for parameter in list(self._homes):
            self.bring(parameter)


def to_host(value: Tensor) -> Tensor:
    """Return a copy in the memory of the CPU, pinned where there is a GPU; the tensor itself if it is there."""
    if value.device.type == "cpu":
        return value
    return torch.empty_like(value, device="cpu", pin_memory=torch.cuda.is_available()).copy_(value)


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy on a device; the tensor itself if it is there, as after the optimizer's load_state_dict."""
    return value.to(device)
