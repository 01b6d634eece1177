"""Records of the leaderboard."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer, Checked


class CellLine(Answer):
    """A trial that was trained again."""

    run_id: str
    """The run that repeats it."""
    arm: str
    """Its arm."""
    combination: str
    """The varied values in one line."""
    seed: int
    """Its seed."""
    metric: str
    """Name of the compared metric."""
    archived: float
    """Its value in the archive."""
    again: float | None
    """Its value now; null if it did not finish."""
    tolerance: float
    """Allowed difference; bit-identical values are always equal."""
    is_equal: bool
    """Whether both values are equal within the tolerance."""


class SubmissionReport(Answer):
    """Whether a study keeps the rules of the leaderboard."""

    task: str
    """The task."""
    study: str
    """Its file."""
    archive: str
    """The archive of its trials."""
    methods: list[str]
    """The submitted arms; empty: all methods of a built-in task."""
    is_accepted: bool
    """Whether no check failed; then the exit code is 0, else 1."""
    checks: list[Checked]
    """One check for each rule, in the order of the guide."""
    cells: list[CellLine]
    """Trials that were trained again."""
    next: list[str]
    """Commands to run next."""


class TaskLine(Answer):
    """A task of the leaderboard."""

    name: str
    """Its name."""
    study: str
    """File of its study."""
    methods: list[str]
    """Its methods."""
    controls: list[str]
    """Its controls."""
    has_archive: bool
    """Whether the repository has trained it."""


class RuleList(Answer):
    """The rules of the leaderboard."""

    version: int
    """Version of the rules."""
    tune_seeds: int
    """Seeds of tuning, at least."""
    report_seeds: int
    """Seeds of the report, at least."""
    may_change: list[str]
    """Recipe keys that a method may change."""
    tasks: list[TaskLine]
    """The tasks."""
