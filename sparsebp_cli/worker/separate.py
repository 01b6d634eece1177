"""What optimizers share that update each parameter from its own gradient and state alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.worker.precision import keep_precision


class SeparateOptimizer(torch.optim.Optimizer, ABC):
    """One parameter after the other; its state is in single precision, whatever the weights are in."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, in the precision that it was saved in.

        Args:
            state_dict: Of such an optimizer.
        """
        super().load_state_dict(state_dict)
        keep_precision(self, state_dict)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Args:
            closure: None.
        """
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    @abstractmethod
    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Change a parameter by its gradient, with what its group says."""
