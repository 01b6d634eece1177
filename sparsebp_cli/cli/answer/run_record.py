"""Records of runs and studies."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sparsebp_cli.cli.answer.record import Answer, FieldChange, Number


class RunLine(Answer):
    """One run."""

    run_id: str
    """Id, which never changes; every verb accepts it."""
    name: str
    """Name of its recipe; ``?`` of a damaged plan."""
    policy: str
    """Its policies and their options, in one line."""
    state: str
    """``queued``, ``running``, ``finished``, ``failed``, ``interrupted``, ``cancelled``, ``unreachable``; ``damaged``
    without a plan."""
    step: int
    """Optimizer steps that are done."""
    max_steps: int
    """Optimizer steps in all."""
    seed: int | None
    """Seed of the training."""
    eval_loss: Number | None
    """Last loss on validation data; null without one, or where it is not finite."""
    created: float
    """Seconds since 1970 at which its plan was made."""
    folder: str
    """Where its files are."""
    tags: list[str] = Field(default_factory=list)
    """Its tags; ``@TAG`` names its runs."""
    note: str = ""
    """What somebody wrote on it."""
    problem: str = ""
    """What of its files cannot be read; empty where all can."""
    arm: str | None = None
    """Arm of the study that was asked for."""
    combination: str | None = None
    """Varied values in that study."""
    role: str | None = None
    """``rehearse``, ``tune``, ``report`` or ``control`` in that study."""
    columns: dict[str, Any] = Field(default_factory=dict)
    """Values of the columns that ``--columns`` asked for beyond these fields."""


class RunList(Answer):
    """Runs of this machine, in the order that was asked for."""

    runs: list[RunLine]
    """The first ``--limit`` of them."""
    not_shown: int
    """How many more there are."""


class Losses(Answer):
    """Whether two runs have the same losses to the bit."""

    same: bool
    """Whether all are equal."""
    text: str
    """How many, or where they first differ."""


class RunOutcome(Answer):
    """What became of a run that a verb started, continued or stopped."""

    run: RunLine
    """The run, at the end of the verb."""
    exit_code: int
    """What this run adds to the verb's exit code: 0 where nothing is wrong, or it was only started."""
    text: str
    """How it ended, or what was done to it; empty where there is no more to say than its state."""
    log_file: str
    """Output of its worker."""
    changes: list[FieldChange] = Field(default_factory=list)
    """Why it was refused, where it is no longer what it was."""
    repeats: str | None = None
    """Id of the run that it repeats."""
    losses: Losses | None = None
    """How its losses compare with those of the run that it repeats."""


class RunOutcomes(Answer):
    """What became of runs, in their order."""

    runs: list[RunOutcome]
    """One for each run that was named or made."""
    next: list[str]
    """Commands that go on from here."""


class PlannedRun(Answer):
    """A run that was planned, and nothing else."""

    run_id: str
    """Id that the plan has; no run has it yet."""
    plan: dict[str, Any]
    """Content of ``plan.json``."""
    files: dict[str, str]
    """Files that its target would get beside the plan, by name."""
    command: list[str]
    """Command that would be started."""


class RunPlans(Answer):
    """Plans; nothing was written or started."""

    plans: list[PlannedRun]
    """In the order in which they would run."""


class MarginAnswer(Answer):
    """Whether one recipe is not worse than the baseline by more than a margin."""

    name: str
    """Name of the recipe."""
    group: str
    """Hash of the recipe without its seed."""
    answer: str
    """``yes``, ``no`` or ``inconclusive``."""
    more_seeds: int | None
    """About how many more seeds would decide."""


class MarginAnswers(Answer):
    """Answers of ``run --until-ci``."""

    metric: str
    """The quality metric."""
    margin: float
    """How much worse still counts as not worse."""
    looks: list[int]
    """Numbers of seeds after which it looks."""
    level: float
    """Chance of error of each look; over all looks and groups together it is 5 % at most."""
    stopped: str
    """``decided``, ``seeds`` (all were used), ``minutes`` (no time was left) or ``failed`` (a run did not finish)."""
    answers: list[MarginAnswer]
    """One for each recipe besides the baseline."""
    runs: list[str]
    """Ids of the runs that were looked at."""
    next: list[str]
    """Commands that go on from here."""


class RunLog(Answer):
    """Output of a run's worker."""

    run: RunLine
    """The run."""
    lines: list[str]
    """What its worker printed."""
    text: str
    """Its state, and why it ended."""


class Labelled(Answer):
    """Tags and note of a run."""

    run_id: str
    """The run."""
    tags: list[str]
    """Its tags."""
    note: str
    """Its note; empty for none."""


class LabelList(Answer):
    """Tags and notes of runs, after the change."""

    runs: list[Labelled]
    """In the order in which they were named."""


class ArchiveFile(Answer):
    """An archive of runs."""

    file: str
    """Where it is."""
    bytes: int
    """Its size."""
    runs: list[str]
    """Ids of the runs in it."""
    next: list[str]
    """Commands that read it."""


class FreedRun(Answer):
    """Room that a run gave back."""

    run_id: str
    """The run."""
    name: str
    """Name of its recipe."""
    bytes: int
    """Size of what was deleted."""


class FreedRuns(Answer):
    """What was deleted, or with ``--dry-run`` would be."""

    runs: list[FreedRun]
    """Runs of which something is deleted."""
    bytes: int
    """Their sum."""
    is_dry: bool
    """Whether nothing was deleted."""


class TrialLine(Answer):
    """One trial of a study."""

    run_id: str
    """Its run."""
    role: str
    """``rehearse``, ``tune``, ``report`` or ``control``."""
    arm: str
    """Its arm."""
    combination: str
    """Varied values; empty where nothing is varied."""
    seed: int
    """Its seed."""
    status: str
    """``waiting``, ``running``, ``finished``, ``diverged``, ``failed``, ``interrupted``, ``cancelled``,
    ``unreachable``, ``paused`` or ``pruned``."""
    problem: str
    """Why it failed or could not be started; empty where nothing is wrong."""
