"""Records of ``validate --memory``, separate from recipes' records, because they import the plan."""

from __future__ import annotations

from sparsebp_cli.cli.answer.record import Answer, Problem
from sparsebp_tools.forecast.record import Forecast


class StepNeed(Answer):
    """Memory, work and time of a step on the device."""

    peak_bytes: int
    """Peak memory."""
    peak_phase: str
    """Phase of the peak: ``forward``, ``backward`` or ``update``."""
    probe_bytes: int | None
    """Estimated peak of a probe; null if the recipe has none."""
    need_bytes: int
    """Required free memory."""
    fit: str
    """Whether that fits, in words."""
    step_flops: float
    """Work of a step."""
    hours: float | None
    """Time of the training; null without a known rate."""


class RemedyNeed(Answer):
    """Memory of a step with a change of the recipe."""

    changes: list[str]
    """Values of ``--set``."""
    need_bytes: int | None
    """Required free memory with the change; null if unknown."""
    fit: str | None
    """Whether that fits, in words."""


class ForecastFacts(Answer):
    """The forecast for a recipe."""

    file: str
    """File as given."""
    forecast: Forecast
    """The counted values."""
    policy: StepNeed
    """With the recipe's policies."""
    dense: StepNeed
    """With every gradient computed."""
    remedies: list[RemedyNeed]
    """One for each of ``forecast.remedies``, in the same order."""


class ForecastProblem(Answer):
    """A recipe without a forecast."""

    file: str
    """File as given."""
    error: Problem
    """The error."""


class ForecastAnswer(Answer):
    """The forecasts of a command."""

    recipes: list[ForecastFacts]
    """One for each valid recipe."""
    problems: list[ForecastProblem]
    """One for each other recipe."""
