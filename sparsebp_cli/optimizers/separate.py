"""Base class and checks of optimizers that update each parameter from its own gradient and state alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.errors import UnsupportedError


def keep_precision(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Restore the saved precision after ``load_state_dict``, which casts all state to the dtype of the weights."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in state_dict["state"].items():
        parameter = parameters[number]
        state = optimizer.state[parameter]
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dtype != state[name].dtype:
                state[name] = value.to(state[name].device, copy=True)


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Run the closure of a step with gradients enabled and return its loss; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def refuse_complex(parameters: Iterable[Tensor], name: str) -> None:
    """Raise ValueError for complex parameters, whose imaginary part would be dropped."""
    for parameter in parameters:
        if parameter.is_complex():
            raise ValueError(f"{name} supports only real parameters, got {parameter.dtype}")


def refuse_sparse(gradient: Tensor, name: str) -> None:
    """Raise UnsupportedError for the gradient of an embedding made with ``sparse=True``."""
    if gradient.is_sparse:
        raise UnsupportedError(f"{name} does not support sparse gradients: create the embedding with sparse=False")


def check_not_negative(values: Mapping[str, object]) -> None:
    """Raise ValueError for an option, by name, that is not a number of 0 or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0.0:
            raise ValueError(f"{name} must be a number of 0 or more, got {value!r}")


def check_betas(betas: tuple[float, ...]) -> None:
    """Raise ValueError unless the decay rates of Adam's moments are two numbers in [0, 1)."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return float32, or the tensor's dtype if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def adam_step(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Update the moments in ``state`` with a gradient, and return Adam's step without the learning rate. ``step`` in
    the state must already include this step."""
    beta1, beta2 = group["betas"]
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    mean, square, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
    mean.lerp_(gradient, 1.0 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    root = (square / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
    moved: Tensor = (mean / (1.0 - beta1**step)).div_(root)
    return moved


class SeparateOptimizer(torch.optim.Optimizer, ABC):
    """A base class of optimizers that update each parameter independently of the others. Its state is in float32, or
    in the weights' dtype if that is wider."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Raise ValueError for complex parameters."""
        super().add_param_group(param_group)
        refuse_complex(self.param_groups[-1]["params"], type(self).__name__)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in the precision in which it was saved."""
        super().load_state_dict(state_dict)
        keep_precision(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. The closure, if given, computes the gradients first; return its
        result. Raise UnsupportedError for a sparse gradient."""
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
