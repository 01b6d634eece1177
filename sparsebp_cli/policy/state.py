"""State of a policy, from one step to the next. The policy computes it, and the engine stores it.

A policy defines three pure functions. ``init`` returns the first state. ``measure`` returns numbers about what the
policy observes in a step. ``observe`` returns the next state from them. The engine saves the state in checkpoints and
moves it to the model's device. Probes do not change it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, final

from sparsebp_cli.policy.contract import State, Step
from sparsebp_cli.policy.measure import Measure, Observation, Observed

Place = TypeVar("Place")  # where the policy decides, such as a Site or a Parameter


@dataclass(frozen=True)
class TrialPass:
    """A trial pass that a policy requests: its batch, draw and state.

    Args:
        batch: 0 for the step's first micro-batch, 1 for another one, and so on.
        draw: Number of the random decisions' draw, at least 1. Different numbers are independent draws.
        state: The state that the policy's decisions read in this pass; None: the state before the step.
    """

    batch: int = 0
    draw: int = 1
    state: State | None = None


class Stateful(ABC, Generic[Place]):
    """A policy of any kind with state: derive from this class and from the kind. Its decision reads ``step.state``.

    State is a mapping of names to tensors and numbers, with the same names, shapes and dtypes at every step. The engine
    sorts it by name.
    """

    @property
    def observes(self) -> frozenset[type[Observed]]:
        """Classes of objects that :meth:`measure` receives with these options, at the policy's own places. Gradients of
        parameters come from all trained parameters. A policy with trial passes observes only those passes."""
        return frozenset()

    def measure(self, seen: Observed, step: Step) -> Mapping[str, Measure]:  # noqa: ARG002 - for overrides
        """Return measures of one observed object, under names that the policy chooses, without a "/". The engine calls
        this without recording gradients, and not in probes.

        Args:
            seen: An object of a class that ``observes`` names. It must not be changed.
            step: The current step, with the state. For gradients of parameters it is the step that ended, in a trial
                pass the coming step.

        Returns:
            Measures by name. Without an override there are none.
        """
        return {}

    @final
    def look(self, shown: Iterable[Observed], step: Step) -> Observation:
        """Return the folded measures of several objects of one step.

        Args:
            shown: Objects of one step. The function skips objects that the policy does not observe.
            step: The step of the objects, with the state.

        Returns:
            The observation, as the engine makes it.
        """
        observation = Observation()
        for seen in shown:
            if type(seen) in self.observes:
                observation.add(seen.name, self.measure(seen, step))
        return observation

    @property
    def is_identical(self) -> bool:
        """Whether the state is the same in every process, such as a state that depends only on the step's index.
        Otherwise the policy works in one process only, because each process observes only its own examples."""
        return False

    @abstractmethod
    def init(self, places: Sequence[Place], /) -> State:
        """Return the state before the first step.

        Args:
            places: Places where the policy decides, by its kind. A gradient selector gets its sites, with an empty
                ``batch_shape``; a parameter selector parameters; a block dropper blocks; a part selector weights; an
                input saver linears. Other kinds get none.

        Returns:
            Tensors on the CPU, and numbers.
        """

    @abstractmethod
    def observe(self, state: State, observation: Observation, step: Step) -> State:
        """Return the state after a step. The engine calls this at the end of each optimizer step.

        Args:
            state: State before the step. It must not be changed.
            observation: The folded results of :meth:`measure` over the whole step.
            step: The step that ended.

        Returns:
            New values for all entries.
        """

    @property
    def has_trials(self) -> bool:
        """Whether ``wants_trials`` requests a pass at any step."""
        return False

    def wants_trials(self, step: Step) -> Sequence[Collection[str] | TrialPass]:  # noqa: ARG002 - for overrides
        """Return the trial passes before a step: decisions of a block dropper, passes with their own state of a layer
        sampler or an input saver, or dense passes of a part selector. Only these four kinds support trial passes.

        Each pass is one forward and backward over one micro-batch. All passes use the same random numbers for dropout.
        They change nothing but the state.

        Args:
            step: The coming step, with the state.

        Returns:
            One entry a pass. Without an override there are none.
        """
        return ()

    def observe_trials(self, state: State, observations: Sequence[Observation], step: Step) -> State:  # noqa: ARG002
        """Return the state after the trial passes. The engine calls this before the step that requested them.

        Args:
            state: State before the trial passes. It must not be changed.
            observations: Measures of each pass, in the order of ``wants_trials``.
            step: The coming step.

        Returns:
            New values for all entries.
        """
        return state
