"""Records of ``sparsebp evaluate``."""

from __future__ import annotations

from typing import Any

from sparsebp_cli.cli.answer.record import Answer, Number


class JudgedMetric(Answer):
    """A metric of a task."""

    value: Number
    """Its value."""
    better: str
    """``lower``, ``higher``, or empty if the harness does not say."""


class JudgedTask(Answer):
    """A task of lm-evaluation-harness."""

    version: Any
    """Version of the task in the harness."""
    hash: str
    """The harness's hash of its documents, prompts and targets."""
    examples: int | None
    """Number of evaluated examples."""
    values: dict[str, JudgedMetric]
    """Metrics by name."""


class Evaluation(Answer):
    """A model, evaluated on tasks of lm-evaluation-harness."""

    run_id: str | None
    """Id of the run; null for a folder that is no run."""
    version: str
    """Version of the harness."""
    tasks: dict[str, JudgedTask]
    """Tasks by name."""
    kept: list[str]
    """Names of the metrics that the run stores from this."""
