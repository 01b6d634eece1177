"""The kind of policy that says which parameters are trained at a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sparsebp_cli.policy.contract import Policy, Step


@dataclass(frozen=True)
class Parameter:
    """One parameter that the model would train.

    Args:
        name: In the model; a shared one has its first name.
        layer: Number of the decoder layer that it belongs to, from 0; None outside of the layers.
        num_entries: How many numbers it holds.
    """

    name: str
    layer: int | None
    num_entries: int


class ParameterSelector(Policy):
    """Answers: which parameters are trained at this step? Asked at the start of each step."""

    @property
    @abstractmethod
    def changes(self) -> bool:
        """Whether the answer differs between steps with these options."""

    @abstractmethod
    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        """Choose parameters.

        Args:
            parameters: All that the model would train, in the model's order.
            step: When.

        Returns:
            Names of those that are trained; for the others no gradient is computed, and nothing is stored.
        """
