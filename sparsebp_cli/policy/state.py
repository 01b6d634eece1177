"""State of a policy, from one step to the next. The policy computes it, the engine keeps it.

Three pure functions: ``init`` returns the first state, ``measure`` numbers of what a step sees, ``observe`` the next
state from them. The engine owns the value in between: it is saved in checkpoints, moved with the model's device, and
set aside by probes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, final

from sparsebp_cli.policy.contract import State, Step
from sparsebp_cli.policy.measure import Measure, Observation, Observed

Place = TypeVar("Place")  # where the policy decides: a Site, a Parameter


@dataclass(frozen=True)
class TrialPass:
    """A trial pass as a policy wants it.

    Args:
        batch: 0 for the step's first micro-batch, 1 for another one, and so on.
        draw: Number of the random decisions' draw, at least 1; other numbers give independent draws.
        state: The state that the policy's decisions read in it; None: the state before the step.
    """

    batch: int = 0
    draw: int = 1
    state: State | None = None


class Stateful(ABC, Generic[Place]):
    """A policy of any kind with state: derive from this class and from the kind. Its decision reads ``step.state``.

    State is a mapping of names to tensors and numbers, with the same names, shapes and dtypes at every step. The engine
    hands it over sorted by name.
    """

    @property
    def observes(self) -> frozenset[type[Observed]]:
        """What :meth:`measure` is shown with these options, at the policy's own places; of gradients of parameters,
        those of all that are trained. A policy with trial passes is shown what is in those alone."""
        return frozenset()

    def measure(self, seen: Observed, step: Step) -> Mapping[str, Measure]:  # noqa: ARG002 - for overrides
        """Return numbers of what a step sees, by names of the policy's own without a "/". Called without recording of
        gradients, and not in probes.

        Args:
            seen: An object of a class that ``observes`` names. It must not be changed.
            step: The step that sees it, with the state; of gradients of parameters, the step that ended; in a trial
                pass, the coming one.

        Returns:
            Measures; empty, as without an override: nothing.
        """
        return {}

    @final
    def look(self, shown: Iterable[Observed], step: Step) -> Observation:
        """Return what the policy measures of several things of one step, folded.

        Args:
            shown: Objects of one step; those that the policy does not observe are left out.
            step: The step that sees them, with the state.

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
        """Whether the state is the same in every process, as one that follows from the steps' numbers alone is.
        Otherwise the policy works in one process: each observes only its own examples."""
        return False

    @abstractmethod
    def init(self, places: Sequence[Place], /) -> State:
        """Return the state before the first step.

        Args:
            places: Places where the policy decides: the sites of a gradient selector, with an empty ``batch_shape``,
                which is not known yet; the parameters of a parameter selector; the blocks of a block dropper; the
                weights of a part selector; the linears of an input saver; the rows of the training data, as numbers
                from 0, of an epoch selector, and of an example selector that reads them; otherwise none.

        Returns:
            Tensors on the CPU, and numbers.
        """

    @abstractmethod
    def observe(self, state: State, observation: Observation, step: Step) -> State:
        """Return the state after a step. Called at the end of each optimizer step.

        Args:
            state: State before the step. It must not be changed.
            observation: Measures of the whole step, folded, as :meth:`measure` has returned them.
            step: The step that ended.

        Returns:
            New values for all entries.
        """

    @property
    def has_trials(self) -> bool:
        """Whether ``wants_trials`` asks for any, at whatever step."""
        return False

    def wants_trials(self, step: Step) -> Sequence[Collection[str] | TrialPass]:  # noqa: ARG002 - for overrides
        """Return what is to be tried before a step: decisions, of a block dropper; passes with a state of their own, of
        a layer sampler or an input saver; dense passes, of a part selector.

        Each is one forward and backward over one micro-batch, with the same random numbers of dropout; they cost what
        they cost, and change nothing but the state. Built for these four kinds.

        Args:
            step: The coming one, with the state.

        Returns:
            One entry a pass; empty, as without an override: none.
        """
        return ()

    def observe_trials(self, state: State, observations: Sequence[Observation], step: Step) -> State:  # noqa: ARG002
        """Return the state after the trial passes. Called before the step that they were made for.

        Args:
            state: State before the trial passes. It must not be changed.
            observations: Measures of each pass, in the order of ``wants_trials``.
            step: The coming one.

        Returns:
            New values for all entries.
        """
        return state
