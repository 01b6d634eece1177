"""State of a policy, from one step to the next. The policy computes it, the engine keeps it.

Two pure functions: ``init`` returns the first state, ``observe`` the next one from what a step saw. The engine owns the
value in between: it is saved in checkpoints, moved with the model's device, and set aside by probes.

Shape letters: N rows (= B*T), O output width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from sparsebp_cli.policy.contract import Site, Step

if TYPE_CHECKING:
    from torch import Tensor

    State = Mapping[str, Tensor | float]

Observed = Literal["grad_norm", "column_norm"]


@dataclass(frozen=True)
class Observation:
    """What one optimizer step saw, over all its micro-batches, at the sites where a gradient arrived.

    Norms are 2-norms of the gradients of sites' outputs, before anything was cut, in float32 at least, on the device.
    Read them by tensor operations alone: a conversion to a number waits for the device.

    Args:
        grad_norm: By site, the norm of the whole gradient, 0-d.
        column_norm: By site, the norm of each output feature, (O,).
    """

    grad_norm: Mapping[str, Tensor] = field(default_factory=dict)
    column_norm: Mapping[str, Tensor] = field(default_factory=dict)


class Stateful(ABC):
    """A policy of any kind with state: derive from this class and from the kind.

    State is a mapping of names to tensors and numbers, with the same names, shapes and dtypes at every step.
    """

    @property
    def observes(self) -> frozenset[Observed]:
        """Which parts of the :class:`Observation` are to be computed, at the policy's own sites."""
        return frozenset()

    @property
    def is_identical(self) -> bool:
        """Whether the state is the same in every process, as one that follows from the steps' numbers alone is.
        Otherwise the policy works in one process: each observes only its own examples."""
        return False

    @abstractmethod
    def init(self, sites: Sequence[Site]) -> State:
        """Return the state before the first step.

        Args:
            sites: Where the policy decides, with an empty ``batch_shape``, which is not known yet.

        Returns:
            Tensors on the CPU, and numbers.
        """

    @abstractmethod
    def observe(self, state: State, observation: Observation, step: Step) -> State:
        """Return the state after a step. Called at the end of each optimizer step.

        Args:
            state: Before it. It must not be changed.
            observation: What the step saw.
            step: The step that ended.

        Returns:
            New values for all entries.
        """
