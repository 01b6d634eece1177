"""Base class of optimizers that update each parameter from its own gradient and state alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.worker.contract import evaluate, refuse_complex, refuse_sparse
from sparsebp_cli.worker.precision import keep_precision


class SeparateOptimizer(torch.optim.Optimizer, ABC):
    """Updates one parameter after the other. Its state is in single precision, or in that of the weights if it is
    wider."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; a complex one is a ValueError."""
        super().add_param_group(param_group)
        refuse_complex(self.param_groups[-1]["params"], type(self).__name__)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in the precision in which it was saved."""
        super().load_state_dict(state_dict)
        keep_precision(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, and return the closure's result; the closure, if given, computes
        the gradients first. A sparse gradient is an UnsupportedError."""
        loss = evaluate(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    refuse_sparse(parameter.grad, type(self).__name__)
                    self._update(parameter, group)
        return loss

    @abstractmethod
    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter from its gradient with the options of its group."""
