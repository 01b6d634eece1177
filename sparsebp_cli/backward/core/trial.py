"""Trial passes before a step: they measure gradients under other decisions, if a policy requests it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

from torch import nn

from sparsebp_cli.backward.core.extension import EngineExtension
from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.backward.patch.rewind import Rewind
from sparsebp_cli.errors import UsageError
from sparsebp_cli.policy import Policy, Step, TrialPass


class TrialExtension(EngineExtension):
    """An extension that can use another decision for a trial pass."""

    policy: Policy

    @abstractmethod
    def trying(self, decision: Collection[str] | TrialPass) -> AbstractContextManager[None]:
        """Return a context in which the policy uses this decision, or reads the state of this pass."""


class Trials:
    """The trial passes that the policies of one model request.

    ``run_pass`` runs forward and backward of one micro-batch, with gradients in ``.grad`` and no other effect on the
    engine.
    """

    def __init__(self, model: nn.Module, states: PolicyStates, extensions: Sequence[EngineExtension]) -> None:
        self._model, self._states = model, states
        self._trying = [extension for extension in extensions if isinstance(extension, TrialExtension)]
        self._done: int | None = None  # the step whose trial passes have run

    def are_due(self, step: Step) -> bool:
        """Return whether a policy requests passes before a step that have not run yet."""
        if step.draw or step.micro_batch or step.index == self._done:
            return False
        return any(self._states.wanted(part.policy, step) for part in self._trying)

    def check_made(self, step: Step) -> None:
        """Raise :class:`UsageError` if trial passes are due before this step's backward."""
        if self.are_due(step):
            raise UsageError(
                f"a policy needs trial passes before step {step.index}: call engine.run_trials(forward) before "
                "the first forward of the step"
            )

    def count_batches(self, step: Step) -> int:
        """Return the number of micro-batches in the passes before a step."""
        wanted = [trial for part in self._trying for trial in self._states.wanted(part.policy, step)]
        return max((_as_pass(trial).batch + 1 for trial in wanted), default=0)

    def run(self, step: Step, run_pass: Callable[[TrialPass], object]) -> None:
        """Run the passes of all policies, and update the states with their observations."""
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
