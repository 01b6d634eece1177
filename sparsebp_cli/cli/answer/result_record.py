"""Records of results: of one run, of two, of an evaluation, and what was sent."""

from __future__ import annotations

from typing import Any

from sparsebp_cli.cli.answer.record import Answer, Number


class MetricRange(Answer):
    """A metric of a run: its ends. The journal has every value."""

    points: int
    """How many values there are."""
    first_step: int
    """Step of the first."""
    first: Number
    """The first value; null where it is not finite."""
    last_step: int
    """Step of the last."""
    last: Number
    """The last value."""


class Note(Answer):
    """What a worker noted."""

    attempt: int
    """Which start of the run it was, counted from 1."""
    level: str
    """``detail``, ``info`` or ``warning``."""
    text: str
    """One line."""


class RunFacts(Answer):
    """Everything about one run. Mappings by step have the step as text."""

    run_id: str
    """Its id."""
    name: str
    """Name of its recipe."""
    labels: dict[str, Any]
    """``tags`` and ``note``."""
    state: str
    """Its state."""
    plan: dict[str, Any]
    """Content of ``plan.json``."""
    facts: dict[str, Any]
    """What its worker found out, such as the census of the data."""
    environments: list[dict[str, Any]]
    """Machine and packages of each attempt."""
    metrics: dict[str, MetricRange]
    """By name."""
    layers: dict[str, Any]
    """By metric: kept share and fidelity by layer and step."""
    memory: dict[str, Any]
    """By step: live bytes over a step, in parts."""
    samples: dict[str, Any]
    """By step: texts that were generated."""
    proofs: dict[str, dict[str, dict[str, Number | None]]]
    """By step and module: what its backward executed and stored."""
    notes: list[Note]
    """In their order."""
    ends: list[dict[str, Any]]
    """How each attempt ended."""
    files: dict[str, str]
    """Its files, by name."""


class SentRun(Answer):
    """What MLflow or another tracker has of a run."""

    run_id: str
    """The run."""
    name: str
    """Name of its recipe."""
    tracker: str
    """Who has it: mlflow, or the name of a tracker."""
    points_sent: int
    """Values that were sent now; to a tracker all, of which it keeps those that it lacks."""
    is_complete: bool
    """Whether it has all."""
    problem: str
    """Why not; empty where it has all."""
    uri: str
    """The store, without a password, or the tracker's place."""
    mlflow_run_id: str
    """The run in MLflow; empty of another tracker."""
    next: str
    """What sends it to another store, where its own is refused; else empty."""


class SentRuns(Answer):
    """What MLflow and other trackers have of runs."""

    runs: list[SentRun]
    """One for each run and tracker."""
