"""What optimizers share that update each parameter from its own gradient and state alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.worker.contract import evaluate, refuse_complex, refuse_sparse
from sparsebp_cli.worker.precision import keep_precision


class SeparateOptimizer(torch.optim.Optimizer, ABC):
    """One parameter after the other; its state is in single precision, or that of the weights where it is wider."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take further parameters.

        Args:
            param_group: As for any optimizer.

        Raises:
            ValueError: A parameter is complex.
        """
        super().add_param_group(param_group)
        refuse_complex(self.param_groups[-1]["params"], type(self).__name__)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, in the precision that it was saved in.

        Args:
            state_dict: Of such an optimizer.
        """
        super().load_state_dict(state_dict)
        keep_precision(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the gradients first; None: they are there.

        Returns:
            What the closure gives.

        Raises:
            UnsupportedError: A gradient is sparse.
        """
        loss = evaluate(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    refuse_sparse(parameter.grad, type(self).__name__)
                    self._update(parameter, group)
        return loss

    @abstractmethod
    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """FieldChange a parameter by its gradient, with what its group says."""
