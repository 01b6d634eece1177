"""What a forecast says of trial passes and of the steps behind them is what real ones take, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.training import Training
from sparsebp_tools.forecast.measure import forecast
from sparsebp_tools.forecast.record import ForecastRequest, StepForecast
from sparsebp_tools.memory import memory_trace

LINEARS = ["model.layers.*"]
POLICIES: dict[str, dict[str, Any]] = {
    "sift": {"name": "subnet", "keep": 0.05, "elements": LINEARS},
    "entries of all linears together": {"name": "subnet", "keep": 0.05, "elements": LINEARS, "scope": "model"},
    "blocks": {"name": "subnet", "keep": 0.25, "blocks": LINEARS, "block_size": 16},
    "rows": {"name": "subnet", "keep": 0.25, "rows": LINEARS},
}


def _forecast(run: RunFolder) -> StepForecast:
    request = ForecastRequest(plan=Plan.load(run.plan_file), gpu=False, flops_per_second=1.0, remedies=False)
    return forecast(request, lambda *_: None).policy


def _measure(run: RunFolder) -> tuple[int, int]:
    """Return the peaks of the first step, which trial passes come before, and of the third one."""
    with JournalWriter(run.path, durable=False) as journal:
        training = Training.build(Plan.load(run.plan_file), run, journal, StopRequest())
        peaks = []
        for training.step in range(3):
            with memory_trace(training.bare, training.optimizer) as trace:
                training._train_step()
            peaks.append(trace.peak.split.total)
    return peaks[0], peaks[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_parts_chosen_by_trial_passes_are_forecast(
    tiny_recipe: Callable[..., Recipe], prepared: Callable[[Recipe], RunFolder], name: str
) -> None:
    run = prepared(tiny_recipe(policy=[POLICIES[name]]))
    found = _forecast(run)
    assert found.trial is not None
    first, later = _measure(run)
    # Temporaries of an operator are not seen: here those by which all entries are sorted at once.
    within = 0.25 if "scope" in POLICIES[name] else 0.1
    assert max(found.trial.total, found.peak.total) == pytest.approx(first, rel=within)
    assert found.peak.total == pytest.approx(later, rel=0.1)
    assert found.trial.total > found.peak.total, "whole gradients, and their magnitudes"
