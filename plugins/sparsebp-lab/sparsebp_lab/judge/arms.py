"""Define how a judge trains the two sides of a question: as trials, each trained once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from sparsebp_cli.plan import LedgerMark
from sparsebp_lab.judge.question import Proposal


class SideTrial(Protocol):
    """A side with a seed."""

    @property
    def run_id(self) -> str:
        """Id derived from what the trial trains, so that it is trained only once."""


T = TypeVar("T", bound=SideTrial)


class Arms(Protocol[T]):
    """Train the trials of a question. A finished trial stays finished for every later command. If two commands need one
    trial, one of them trains it."""

    mark: LedgerMark | None  # written into the plan of each run that is started

    @property
    def proposal(self) -> Proposal:
        """The question."""

    def find_rehearsals(self) -> Sequence[T]:
        """Return the trials that measure costs; once all have finished there may be more."""

    def make_trial(self, side: str, seed: int, *, test: bool = False) -> T:
        """Return a trial of a side; with ``test`` it reads the test split."""

    def is_done(self, trial: T) -> bool:
        """Return whether a trial has finished."""

    def train(self, trials: Sequence[T], pause: Callable[[], None]) -> None:
        """Train trials until all are over, or after :meth:`stop` until all have ended. ``pause`` waits a moment."""

    def stop(self) -> None:
        """Start no further runs, and ask running ones to end."""

    def kill(self) -> None:
        """End running trials at once."""

    def find_unfinished(self, trials: Sequence[T]) -> list[str]:
        """Return a line for each trial without a result."""

    def has_diverged(self, trial: T) -> bool:
        """Return whether a trial ended with numbers that are not finite."""

    def read(self, trial: T, metric: str = "") -> float | None:
        """Return a finished trial's deciding metric, or the named one; None if it has none."""

    def find_run(self, trial: T) -> str:
        """Return the id under which a trial's run is found."""

    def find_cost(self, trial: T) -> Mapping[str, float]:
        """Return the cost of a trial: ``flops`` (0.0 if unknown) and ``seconds``."""
