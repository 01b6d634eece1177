"""Measurement of the parameters that an optimizer step changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moved:
    """How many entries of one or more parameters a step changed.

    Args:
        entries: Number of all entries.
        moved: Number of entries whose value changed.
    """

    entries: int
    moved: int

    @property
    def share(self) -> float:
        """``moved`` over ``entries``, in [0, 1]; 0.0 for no entries."""
        return self.moved / self.entries if self.entries else 0.0


class Movement:
    """A copy of parameters before a step, to compare with the parameters after it.

    The copy is in host memory, with the size of the parameters.

    Args:
        parameters: Names and trained parameters.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._parameters = dict(parameters)
        # copy=True, because on a CPU `to` would return the parameter itself.
        self._before = {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()}

    def measure(self) -> dict[str, Moved]:
        """Compare with the present parameters.

        Returns:
            The change of each, by name.
        """
        moved = {}
        for name, parameter in self._parameters.items():
            changed = torch.ne(parameter.detach().to("cpu"), self._before[name])
            moved[name] = Moved(parameter.numel(), int(changed.sum()))
        return moved
