"""State of a policy, from one step to the next. The policy computes it, the engine keeps it.

Two pure functions: ``init`` returns the first state, ``observe`` the next one from what a step saw. The engine owns the
value in between: it is saved in checkpoints, moved with the model's device, and set aside by probes.

Shape letters: N rows (= B*T), O output width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from sparsebp_cli.policy.contract import Step

if TYPE_CHECKING:
    from torch import Tensor

    State = Mapping[str, Tensor | float]

Observed = Literal["grad_norm", "column_norm", "parameter_l1"]
Place = TypeVar("Place")  # where the policy decides: a Site, a Parameter, a ResidualBlock


@dataclass(frozen=True)
class Observation:
    """What one optimizer step saw, over all its micro-batches, where a gradient arrived.

    All are in float32 at least, on the device. Read them by tensor operations alone: a conversion to a number waits for
    the device.

    Args:
        grad_norm: By site, the 2-norm of the whole gradient of its output, before anything was cut, 0-d.
        column_norm: By site, the 2-norm of each output feature of that, (O,).
        parameter_l1: By parameter, the sum of the magnitudes of the gradient that the optimizer got, after clipping,
            0-d. Sharing modules have one entry, by the first name.
    """

    grad_norm: Mapping[str, Tensor] = field(default_factory=dict)
    column_norm: Mapping[str, Tensor] = field(default_factory=dict)
    parameter_l1: Mapping[str, Tensor] = field(default_factory=dict)


class Stateful(ABC, Generic[Place]):
    """A policy of any kind with state: derive from this class and from the kind. Its decision reads ``step.state``.

    State is a mapping of names to tensors and numbers, with the same names, shapes and dtypes at every step.
    """

    @property
    def observes(self) -> frozenset[Observed]:
        """Which parts of the :class:`Observation` are to be computed, at the policy's own sites; of
        parameters, at all that are trained."""
        return frozenset()

    @property
    def is_identical(self) -> bool:
        """Whether the state is the same in every process, as one that follows from the steps' numbers alone is.
        Otherwise the policy works in one process: each observes only its own examples."""
        return False

    @abstractmethod
    def init(self, places: Sequence[Place], /) -> State:
        """Return the state before the first step.

        Args:
            places: Where the policy decides: the sites of a gradient selector, with an empty ``batch_shape``, which is
                not known yet; the parameters of a parameter selector; the blocks of a block dropper; otherwise none.

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
