"""Which parameters an optimizer step really changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moved:
    """How much of a parameter, or of several, a step changed.

    Args:
        entries: All of them.
        moved: Those whose value is another one than before.
    """

    entries: int
    moved: int

    @property
    def share(self) -> float:
        """``moved`` over ``entries``, in [0, 1]; 0.0 for no entries."""
        return self.moved / self.entries if self.entries else 0.0


class Movement:
    """Parameters before a step, to be held against those after it.

    The copy is on the host: it costs as much host memory as the parameters have, and none of an accelerator's.

    Args:
        parameters: Name and parameter; those that are trained.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._parameters = dict(parameters)
        self._before = {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()}

    def measure(self) -> dict[str, Moved]:
        """Compare with the parameters as they are now.

        Returns:
            What moved of each, by name.
        """
        moved = {}
        for name, parameter in self._parameters.items():
            changed = torch.ne(parameter.detach().to("cpu"), self._before[name])
            moved[name] = Moved(parameter.numel(), int(changed.sum()))
        return moved
