"""Records of results: of one run, of two, of an evaluation, and of sending to MLflow."""

from __future__ import annotations

from typing import Any

from sparsebp_cli.cli.answer.record import Answer, Number


class MetricRange(Answer):
    """First and last value of a run's metric. The event log has every value."""

    points: int
    """Number of values."""
    first_step: int
    """Step of the first value."""
    first: Number
    """The first value; null if it is not finite."""
    last_step: int
    """Step of the last value."""
    last: Number
    """The last value; null if it is not finite."""


class Note(Answer):
    """A note of a worker."""

    attempt: int
    """Number of the attempt, counted from 1."""
    level: str
    """``detail``, ``info`` or ``warning``."""
    text: str
    """One line."""


class RunFacts(Answer):
    """Everything about one run. Mappings by step have the step as text."""

    run_id: str
    """Id of the run."""
    name: str
    """Name of its recipe."""
    labels: dict[str, Any]
    """``tags`` and ``note``."""
    state: str
    """State of the run."""
    plan: dict[str, Any]
    """Content of ``plan.json``."""
    facts: dict[str, Any]
    """Facts that its worker recorded, such as data statistics."""
    environments: list[dict[str, Any]]
    """Machine and packages of each attempt."""
    metrics: dict[str, MetricRange]
    """First and last values, by metric."""
    layers: dict[str, Any]
    """By metric: fraction kept and fidelity by layer and step."""
    samples: dict[str, Any]
    """By step: generated texts."""
    proofs: dict[str, dict[str, dict[str, Number | None]]]
    """By step and module: what its backward executed and stored."""
    notes: list[Note]
    """Notes in their order."""
    ends: list[dict[str, Any]]
    """How each attempt ended."""
    files: dict[str, str]
    """Paths of its files, by name."""


class SentRun(Answer):
    """What MLflow has of a run."""

    run_id: str
    """Id of the run."""
    name: str
    """Name of its recipe."""
    tracker: str
    """Always ``mlflow``."""
    points_sent: int
    """Number of values sent now."""
    is_complete: bool
    """Whether it has all values."""
    problem: str
    """Why it lacks values; empty if it has all."""
    uri: str
    """The store's address without a password."""
    mlflow_run_id: str
    """Id of the run in MLflow; empty if it was not reached."""
    next: str
    """If its store refuses the run: command that sends it to another store. Else empty."""


class SentRuns(Answer):
    """What MLflow has of runs."""

    runs: list[SentRun]
    """One for each run."""
