"""Steps the user's optimizer for one parameter at a time.

The optimizer sees one group with one parameter; its state, options and schedules stay in the user's object. So the
cost of an update does not depend on the number of parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from sparsebp_cli.backward.core.clock import bare_optimizer
from sparsebp_cli.errors import UnsupportedError


class PerParameterStep:
    """Steps an optimizer parameter by parameter.

    :meth:`write_back` copies values that a step writes into its group, such as a step count, once to the optimizer's
    group. The class accepts accelerate's wrapper around the optimizer. Raises :class:`UnsupportedError` for an object
    that is not a torch optimizer, or whose step needs a closure.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = bare_optimizer(optimizer)
        self._step = bare_step(self.optimizer)
        self._group_of: dict[Tensor, int] = {}
        self._options: list[dict[str, object]] = []
        self._after: dict[int, dict[str, object]] = {}

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in the optimizer's order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def start(self) -> None:
        """Read the groups. Their options, such as the learning rate, apply to all following updates."""
        groups = self.optimizer.param_groups
        self._group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
        self._options = [{name: value for name, value in g.items() if name != "params"} for g in groups]
        self._after = {}

    def update(self, parameter: Tensor) -> None:
        """Update one of the optimizer's parameters with its gradient."""
        number, groups = self._group_of[parameter], self.optimizer.param_groups
        # Pass one parameter, so that an update's time does not depend on the number of parameters. See decision 18.
        shown = {**self._options[number], "params": [parameter]}
        try:
            self.optimizer.param_groups = [shown]
            self._step(self.optimizer)
        finally:
            self.optimizer.param_groups = groups
        self._after[number] = shown
        # Some optimizers write through ``.data``, which does not count as a change. With the version increased,
        # autograd refuses a graph that still needs the old values.
        torch.autograd.graph.increment_version(parameter)

    def write_back(self) -> None:
        """Write back values that the updates since :meth:`start` wrote into their groups."""
        for number, after in self._after.items():
            before, group = self._options[number], self.optimizer.param_groups[number]
            for name, value in after.items():
                if name != "params" and (name not in before or before[name] is not value):
                    group[name] = value
        self._after = {}


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """Return an optimizer's step without the hooks that PyTorch runs around it.

    Raises :class:`UnsupportedError` if the step needs a closure, which evaluates the whole model several times.
    """
    step: Callable[[torch.optim.Optimizer], object] = type(optimizer).step
    if getattr(step, "hooked", False):  # PyTorch wraps the method once, at the first optimizer of the class
        step = getattr(step, "__wrapped__", step)  # only one level, since the next may be the step's own no_grad
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"update='eager' does not work with {type(optimizer).__name__}, whose step() needs a closure; use "
            "update='deferred'"
        )
    return step
