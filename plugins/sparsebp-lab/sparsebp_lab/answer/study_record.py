"""Records of studies. Apart from those of runs, since what they hold imports the statistics."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer
from sparsebp_cli.cli.answer.run_record import TrialLine
from sparsebp_lab.study.rebuild import RebuiltArm
from sparsebp_lab.study.summary import ArmLine


class StudyState(Answer):
    """Where a study stands."""

    study: str
    """Name of the study; ``@NAME`` names its runs."""
    file: str
    """Its file."""
    num_trials: int
    """Trials in all, those whose combination is not known yet included."""
    num_done: int
    """Trials that have a result."""
    arms: list[ArmLine]
    """One for each arm, then one for each arm's controls."""
    trials: list[TrialLine]
    """Every trial that is known by now, in the order of the stages."""
    notes: list[str]
    """What to know of its choices, in words."""
    next: list[str]
    """Commands that go on from here."""


class RebuiltStudy(Answer):
    """The choices of a study, rebuilt from an archive."""

    study: str
    """Name of the study."""
    archive: str
    """The archive."""
    num_trials: int
    """Trials in it."""
    is_as_chosen: bool
    """Whether everything is as it was reported."""
    arms: list[RebuiltArm]
    """One for each arm."""
    notes: list[str]
    """Choices at an edge of a grid."""
    faults: list[str]
    """Trials that are not as list or rules say."""
