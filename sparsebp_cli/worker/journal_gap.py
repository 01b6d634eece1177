"""Metrics of completed steps that a journal has lost, and that a resumed run will not write again."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, metric

MOST_NAMES = 5


def find_journal_gaps(history: History, step: int, recipe: Recipe) -> list[str]:
    """Return one line for each kind of missing metric before a checkpoint's step."""
    at_steps = set(history.metrics.get(metric.TRAIN_LOSS.name, {})) & set(range(1, step + 1))
    # A metric that all remaining steps have was written at every step.
    names = [name for name, points in history.metrics.items() if at_steps and at_steps <= set(points)]
    evaluated = range(0, step + 1, recipe.measure.eval_every)
    due = {
        _list(names) if names else "all metrics": [n for n in range(1, step + 1) if n not in at_steps],
        metric.EVAL_LOSS.name: [n for n in evaluated if n not in history.metrics.get(metric.EVAL_LOSS.name, {})],
    }
    return [
        f"the journal has lost {what} of {_ranges(missing)}, before the checkpoint of step {step}"
        for what, missing in due.items()
        if missing
    ]


def _list(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _ranges(steps: Sequence[int]) -> str:
    """Return ``step 3`` or ``steps 1 to 4, 7``."""
    found: list[list[int]] = []
    for step in steps:
        if found and found[-1][1] == step - 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    shown = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in found)
    return f"step{'s' * (len(steps) > 1)} {shown}"
