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
        layer: Number of the layer that it belongs to, from 0, an encoder's before a decoder's; None outside of them.
        num_entries: How many numbers it holds, at least 0.
        aliases: Its further names, where modules share it: that of a tied head.
    """

    name: str
    layer: int | None
    num_entries: int
    aliases: tuple[str, ...] = ()


class ParameterSelector(Policy):
    """Answers: which parameters are trained at this step? Asked at the start of each step.

    Whatever it answers, the gradient of what is trained is the dense one, bit for bit: the engine only leaves out what
    nobody asked for. ``exact`` and ``unbiased`` speak of all parameters. So a policy that leaves any of them out is not
    exact: there a gradient is missing that dense has. Nor is it unbiased, as no weight makes up for what is missing.
    """

    @property
    @abstractmethod
    def changes(self) -> bool:
        """Whether the answer may differ between steps with these options."""

    @abstractmethod
    def select(self, parameters: Sequence[Parameter], step: Step) -> Collection[str]:
        """Choose parameters.

        Options that do not fit the model, such as a pattern that matches nothing, are a
        :class:`~sparsebp_cli.errors.PolicyError`: it is raised when the policy is attached, before anything starts.

        Args:
            parameters: All that the model would train, in the model's order.
            step: When; ``step.generator(...)`` is the only source of randomness allowed. Micro-batch, call, draw and
                rank are 0: one answer holds for the whole step, on every process and in every probe.

        Returns:
            Names of those that are trained, at least one; for the others no gradient is computed, and nothing is
            stored.
        """
