"""Records of ``validate --memory``. Apart from those of recipes, since what they hold imports the plan."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer, Problem
from sparsebp_tools.forecast.record import Forecast


class StepNeed(Answer):
    """What a step needs on the device."""

    peak_bytes: int
    """Its peak."""
    peak_phase: str
    """``forward``, ``backward`` or ``update``: where that is."""
    probe_bytes: int | None
    """Peak of a probe, estimated; null where the recipe has none."""
    need_bytes: int
    """What must be free."""
    fit: str
    """Whether that fits, in words."""
    step_flops: float
    """Work of a step."""
    hours: float | None
    """Time of the training; null where no rate is known."""


class RemedyNeed(Answer):
    """What a step would need with a change."""

    changes: list[str]
    """Values of ``--set``."""
    need_bytes: int | None
    """What must be free then; null where that is not known."""
    fit: str | None
    """Whether that fits, in words."""


class ForecastFacts(Answer):
    """What a step of a recipe would need."""

    file: str
    """As it was given."""
    forecast: Forecast
    """What was counted."""
    policy: StepNeed
    """With the recipe's policies."""
    dense: StepNeed
    """With every gradient computed."""
    remedies: list[RemedyNeed]
    """For each of ``forecast.remedies``, in the same order."""


class ForecastProblem(Answer):
    """A recipe of which nothing can be said."""

    file: str
    """As it was given."""
    error: Problem
    """What is wrong."""


class ForecastAnswer(Answer):
    """What steps would need."""

    recipes: list[ForecastFacts]
    """One for each recipe that is right."""
    problems: list[ForecastProblem]
    """The others."""
