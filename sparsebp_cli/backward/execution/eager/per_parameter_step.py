"""One optimizer of the user's, asked to update one parameter at a time.

The optimizer is shown one group that holds one parameter; state, options and schedules stay those of the one object
that the user has. So each update costs the same, however many parameters there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from sparsebp_cli.errors import UnsupportedError


class PerParameterStep:
    """Steps an optimizer parameter by parameter.

    What a step writes into its group (some optimizers count their steps there) is written once for all parameters of
    the group, by :meth:`settle`.

    Args:
        optimizer: Whose update of one parameter looks at no other; accelerate's wrapper may be around it.

    Raises:
        UnsupportedError: It is none of PyTorch's kind, or its step needs the whole model at once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(inner, torch.optim.Optimizer):
            raise UnsupportedError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.optimizer, self._step = inner, bare_step(inner)
        self._group_of: dict[Tensor, int] = {}
        self._options: list[dict[str, Any]] = []
        self._after: dict[int, dict[str, Any]] = {}

    @property
    def parameters(self) -> list[Tensor]:
        """All of them, in the optimizer's order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def start(self) -> None:
        """Look at the groups once; their options, such as the learning rate, hold for all updates that follow."""
        groups = self.optimizer.param_groups
        self._group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
        self._options = [{name: value for name, value in g.items() if name != "params"} for g in groups]
        self._after = {}

    def update(self, parameter: Tensor) -> None:
        """Update one parameter by its gradient.

        Args:
            parameter: One of the optimizer's.
        """
        number, groups = self._group_of[parameter], self.optimizer.param_groups
        shown = {**self._options[number], "params": [parameter]}
        try:
            self.optimizer.param_groups = [shown]
            self._step(self.optimizer)
        finally:
            self.optimizer.param_groups = groups
        self._after[number] = shown
        # Some optimizers write through ``.data``: a graph that still needs the old values must notice.
        torch.autograd.graph.increment_version(parameter)

    def settle(self) -> None:
        """Write into the groups what the updates since :meth:`start` have written."""
        for number, after in self._after.items():
            before, group = self._options[number], self.optimizer.param_groups[number]
            for name, value in after.items():
                if name != "params" and (name not in before or before[name] is not value):
                    group[name] = value
        self._after = {}


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """Return an optimizer's step without the hooks that PyTorch calls around it once a step.

    Args:
        optimizer: Any.

    Returns:
        A function of the optimizer.

    Raises:
        UnsupportedError: The step needs a closure: it looks at the whole model several times.
    """
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"update='eager' cannot drive {type(optimizer).__name__}: its step needs a closure; use update='deferred'"
        )
    return cast("Callable[[torch.optim.Optimizer], object]", step)
