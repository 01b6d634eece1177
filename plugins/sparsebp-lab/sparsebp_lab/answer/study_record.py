"""Records of studies, separate from records of runs, because they import the statistics."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer
from sparsebp_lab.study.rebuild import RebuiltArm
from sparsebp_lab.study.summary import ArmLine


class TrialLine(Answer):
    """One trial of a study."""

    run_id: str
    """Its run."""
    role: str
    """``rehearse``, ``tune``, ``report`` or ``control``."""
    arm: str
    """Its arm."""
    combination: str
    """Varied values; empty if nothing is varied."""
    seed: int
    """Its seed."""
    status: str
    """``waiting``, ``running``, ``finished``, ``diverged``, ``failed``, ``interrupted``, ``cancelled``,
    ``unreachable``, ``paused`` or ``pruned``."""
    problem: str
    """Why it failed or could not start; empty without a problem."""


class StudyState(Answer):
    """The state of a study."""

    study: str
    """Name of the study; ``@NAME`` names its runs."""
    file: str
    """Its file."""
    num_trials: int
    """All trials, including those whose combination is not known yet."""
    num_done: int
    """Trials that have a result."""
    arms: list[ArmLine]
    """One for each arm, then one for each arm's controls."""
    trials: list[TrialLine]
    """Every trial known so far, in the order of the stages."""
    notes: list[str]
    """Remarks on its choices."""
    next: list[str]
    """Commands to run next."""


class RebuiltStudy(Answer):
    """The choices of a study, derived again from an archive."""

    study: str
    """Name of the study."""
    archive: str
    """The archive."""
    num_trials: int
    """Trials in it."""
    is_as_chosen: bool
    """Whether every choice equals the reported one."""
    arms: list[RebuiltArm]
    """One for each arm."""
    notes: list[str]
    """Choices at an edge of a grid."""
    faults: list[str]
    """Trials that differ from the list or the rules."""
