"""Trial passes: what the gradients would be with other decisions, measured before a step for a policy that asks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import nn

from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.backward.core.rewind import Rewind
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Policy, Step, TrialPass

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.extension import EngineExtension


@runtime_checkable
class TriesDecisions(Protocol):
    """An extension whose policy may be given a decision for a trial pass."""

    @property
    def policy(self) -> Policy:
        """The policy."""

    def trying(self, decision: Collection[str] | TrialPass) -> AbstractContextManager[None]:
        """Return a context in which this is the policy's decision, or the state that it reads."""


class Trials:
    """The trial passes that the policies of one model ask for.

    ``run_pass`` runs forward and backward of one micro-batch, with gradients in ``.grad`` and no other effect on the
    engine.
    """

    def __init__(self, model: nn.Module, states: PolicyStates, extensions: Sequence[EngineExtension]) -> None:
        self._model, self._states = model, states
        self._trying = [extension for extension in extensions if isinstance(extension, TriesDecisions)]
        self._done: int | None = None  # the step before which they were made

    def are_due(self, step: Step) -> bool:
        """Whether a policy asks for passes before a step, and they were not made yet."""
        if step.draw or step.micro_batch or step.index == self._done:
            return False
        return any(self._states.wanted(part.policy, step) for part in self._trying)

    def check_made(self, step: Step) -> None:
        """Raise :class:`UsageError` if a backward of training comes before the passes that are due."""
        if self.are_due(step):
            raise UsageError(
                f"a policy wants trial passes before step {step.index}: call engine.run_trials(forward) before the "
                "step's first forward"
            )

    def count_batches(self, step: Step) -> int:
        """Return over how many micro-batches the passes before a step run."""
        wanted = [trial for part in self._trying for trial in self._states.wanted(part.policy, step)]
        return max((_as_pass(trial).batch + 1 for trial in wanted), default=0)

    def run(self, step: Step, run_pass: Callable[[TrialPass], object]) -> None:
        """Make the passes of all policies, and fold what they show into the states."""
        rewind = Rewind(self._model)
        try:
            for part in self._trying:
                found = []
                for decision in self._states.wanted(part.policy, step):
                    # All passes start from the same random numbers, so that only the decision differs. See decision 13.
                    rewind.start()
                    trial = _as_pass(decision)
                    with self._states.trying(part.policy, step, trial.state):
                        with part.trying(decision):
                            run_pass(trial)
                        found.append(self._states.end_trial(part.policy))
                if found:
                    self._states.fold_trials(part.policy, found, step)
        finally:
            rewind.finish()
        self._done = step.index


def _as_pass(wanted: Collection[str] | TrialPass) -> TrialPass:
    return wanted if isinstance(wanted, TrialPass) else TrialPass()
