"""The two sides of a question as whoever trains them sees them: trials, each trained once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from sparsebp_cli.plan import LedgerMark
from sparsebp_lab.judge.question import Proposal


class SideTrial(Protocol):
    """A side with a seed."""

    @property
    def run_id(self) -> str:
        """Known by what it trains, so that nobody trains it twice."""


T = TypeVar("T", bound=SideTrial)


class Arms(Protocol[T]):
    """Trains the trials of a question. What is finished stays finished, whoever asks again; of two commands that want
    one trial, one trains it."""

    mark: LedgerMark | None  # is written into the plan of each run that is started

    @property
    def proposal(self) -> Proposal:
        """The question."""

    def find_rehearsals(self) -> Sequence[T]:
        """Return what must be trained before prices are known; once all have finished there may be more."""

    def make_trial(self, side: str, seed: int, *, test: bool = False) -> T:
        """Return a trial of a side; with ``test`` one that reads the test split."""

    def is_done(self, trial: T) -> bool:
        """Whether a trial has finished."""

    def train(self, trials: Sequence[T], pause: Callable[[], None]) -> None:
        """Train trials until each is over, or after :meth:`stop` until nothing works. ``pause`` waits a moment."""

    def stop(self) -> None:
        """Start nothing more, and ask what works to end."""

    def kill(self) -> None:
        """End what works at once."""

    def find_unfinished(self, trials: Sequence[T]) -> list[str]:
        """Return a line on each trial that has no result."""

    def has_diverged(self, trial: T) -> bool:
        """Whether a trial's result is that its numbers are not finite."""

    def read(self, trial: T, metric: str = "") -> float | None:
        """Return what decides, of a finished trial, or another metric that is named; None if it has none."""

    def find_run(self, trial: T) -> str:
        """Return the id under which a trial's run is found."""

    def find_cost(self, trial: T) -> Mapping[str, float]:
        """Return what a trial has spent: ``flops`` (0.0 if they are not known) and ``seconds``."""
