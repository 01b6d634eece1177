"""Engine metrics for a trainer's log, under the names of :mod:`sparsebp_cli.run.metric`."""

from __future__ import annotations

from sparsebp_cli.backward import Engine
from sparsebp_cli.backward.core.report import Chosen
from sparsebp_cli.run import metric


def interval_values(engine: Engine, num_steps: int) -> dict[str, float]:
    """Return the metrics since the last call, over ``num_steps`` optimizer steps; waits for the device."""
    return _values(engine.take_kept_share(), engine.take_chosen(), num_steps)


def total_values(engine: Engine, num_steps: int) -> dict[str, float]:
    """Return the metrics since the model was attached, over ``num_steps`` optimizer steps; waits for the device."""
    report = engine.report()
    return _values(report.kept_share, report.chosen, num_steps)


def _values(kept_share: float | None, chosen: Chosen | None, num_steps: int) -> dict[str, float]:
    values = {metric.KEPT_SHARE: kept_share}
    if chosen is not None:
        values[metric.TRAINED_SHARE] = chosen.trained_share
        values[metric.CARRIED_SHARE] = chosen.carried_share
        values[metric.SCORING_SECONDS] = chosen.scoring_seconds / num_steps if chosen.scoring_seconds else None
    return {key.name: value for key, value in values.items() if value is not None}
