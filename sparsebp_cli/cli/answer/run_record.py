"""Records of runs and studies."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from sparsebp_cli.cli.answer.record import Answer, FieldChange, Number


class RunLine(Answer):
    """One run."""

    run_id: str
    """Id of the run. It never changes, and every command accepts it."""
    name: str
    """Name of its recipe; ``?`` if the plan is damaged."""
    policy: str
    """Its policies and their options, in one line."""
    state: str
    """``queued``, ``running``, ``finished``, ``failed``, ``interrupted``, ``cancelled``, ``unreachable``; ``damaged``
    without a plan."""
    step: int
    """Number of optimizer steps done."""
    max_steps: int
    """Number of planned optimizer steps."""
    seed: int | None
    """Seed of the training."""
    eval_loss: Number | None
    """Last loss on validation data; null if there is none, or it is not finite."""
    created: float
    """Time at which its plan was made, in seconds since 1970."""
    folder: str
    """Folder of its files."""
    tags: list[str] = field(default_factory=list)
    """Its tags; ``@TAG`` names all runs with a tag."""
    note: str = ""
    """Note of a user."""
    problem: str = ""
    """Unreadable parts of its files; empty if all are readable."""
    arm: str | None = None
    """Variant of the requested study."""
    combination: str | None = None
    """Varied values in that study."""
    role: str | None = None
    """``rehearse``, ``tune``, ``report`` or ``control`` in that study."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Values of additional columns requested with ``--columns``."""


class RunList(Answer):
    """Runs of this machine, in the requested order."""

    runs: list[RunLine]
    """The first ``--limit`` runs."""
    not_shown: int
    """Number of further runs."""


class Losses(Answer):
    """Whether two runs have bit-identical losses."""

    same: bool
    """Whether all losses are equal."""
    text: str
    """Number of equal losses, or the first difference."""


class RunOutcome(Answer):
    """The outcome of a run that a command started, continued or stopped."""

    run: RunLine
    """The run at the end of the command."""
    exit_code: int
    """Exit code for this run: 0 if nothing is wrong, or if the run was only started."""
    text: str
    """How it ended, or what was done to it; empty if its state says enough."""
    log_file: str
    """Path of its worker's output."""
    changes: list[FieldChange] = field(default_factory=list)
    """The changes because of which the run did not start."""
    repeats: str | None = None
    """Id of the run that it repeats."""
    losses: Losses | None = None
    """How its losses compare with those of the repeated run."""


class RunOutcomes(Answer):
    """Outcomes of runs, in their order."""

    runs: list[RunOutcome]
    """One for each named or new run."""
    next: list[str]
    """Commands for the next steps."""


class PlannedRun(Answer):
    """A run that was only planned."""

    run_id: str
    """Id in the plan; the run does not exist yet."""
    plan: dict[str, Any]
    """Content of ``plan.json``."""
    files: dict[str, str]
    """Additional files that its target would get, by name."""
    command: list[str]
    """Command that would be started."""


class RunPlans(Answer):
    """Plans; nothing was written or started."""

    plans: list[PlannedRun]
    """Plans in the order in which they would run."""


class RunLog(Answer):
    """Output of a run's worker."""

    run: RunLine
    """The run."""
    lines: list[str]
    """Output of its worker, line by line."""
    text: str
    """Its state, and why it ended."""


class Labelled(Answer):
    """Tags and note of a run."""

    run_id: str
    """Id of the run."""
    tags: list[str]
    """Its tags."""
    note: str
    """Its note; empty for none."""


class LabelList(Answer):
    """Tags and notes of runs, after the change."""

    runs: list[Labelled]
    """In the order in which the runs were named."""


class ArchiveFile(Answer):
    """An archive of runs."""

    file: str
    """Path of the archive."""
    bytes: int
    """Size of the archive in bytes."""
    runs: list[str]
    """Ids of the runs in it."""
    next: list[str]
    """Commands that read it."""


class FreedRun(Answer):
    """Space that a run freed."""

    run_id: str
    """Id of the run."""
    name: str
    """Name of its recipe."""
    bytes: int
    """Size of the deleted files."""


class FreedRuns(Answer):
    """The deleted files, or with ``--dry-run`` the files that would be deleted."""

    runs: list[FreedRun]
    """Runs with deleted files."""
    bytes: int
    """Total size."""
    is_dry: bool
    """Whether nothing was deleted."""
