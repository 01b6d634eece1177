"""Records of ``sparsebp evaluate``."""

from __future__ import annotations

from typing import Any

from sparsebp_cli.cli.answer.record import Answer, Number


class JudgedMetric(Answer):
    """A metric of a task."""

    value: Number
    """Its value."""
    better: str
    """``lower``, ``higher``, or empty where the harness does not say."""


class JudgedTask(Answer):
    """A task of lm-evaluation-harness."""

    version: Any
    """Version of the task, as the harness has it."""
    hash: str
    """The harness's hash of its documents, prompts and targets."""
    examples: int | None
    """How many were judged."""
    values: dict[str, JudgedMetric]
    """By metric."""


class Evaluation(Answer):
    """A model, judged by tasks of lm-evaluation-harness."""

    run_id: str | None
    """The run; null of a folder that is no run."""
    version: str
    """Version of the harness."""
    tasks: dict[str, JudgedTask]
    """By name."""
    kept: list[str]
    """Names of the metrics that the run keeps from this."""
