"""The memory of watched steps: the split at the peak from metrics, the curve from the journal."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebp_cli.compare.grid import Grid
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.measured import Cost, StepMemory
from sparsebp_cli.compare.number import BYTES, scaled
from sparsebp_cli.run import metric
from sparsebp_cli.run.memory import PARTS, MemoryCurve, MemorySplit
from sparsebp_cli.run.picture import WORDS

_METRICS = (
    metric.PEAK_WEIGHT_BYTES,
    metric.PEAK_GRADIENT_BYTES,
    metric.PEAK_OPTIMIZER_BYTES,
    metric.PEAK_ACTIVATION_BYTES,
    metric.PEAK_WORKSPACE_BYTES,
)


def find_step_peak(runs: Sequence[LoadedRun]) -> MemorySplit | None:
    """Return the split of the run and step with the highest peak; None when no step was watched."""
    found = []
    for run in runs:
        series = [run.series(part.name) for part in _METRICS]
        steps = (step for step in run.series(metric.STEP_PEAK_BYTES.name) if all(step in s for s in series))
        found += [MemorySplit(*(round(values[step]) for values in series)) for step in steps]
    return max(found, key=lambda split: split.total, default=None)


def find_curve(runs: Sequence[LoadedRun]) -> StepMemory | None:
    """Return the curve of the last watched step of the newest run that has one; None without."""
    for run in sorted(runs, key=lambda run: run.created, reverse=True):
        if run.history.memory:
            step = max(run.history.memory)
            return StepMemory(run.run_id, step, MemoryCurve.from_values(run.history.memory[step]))
    return None


def step_grid(costs: Sequence[tuple[str, Cost]]) -> Grid:
    """Return the table of watched steps from labels and costs of all groups; without rows when no step was watched."""
    rows = []
    for label, cost in costs:
        if (split := cost.step_peak) is not None:
            rows.append((label, *(scaled(float(n), BYTES) for n in (split.total, *(getattr(split, p) for p in PARTS)))))
    note = (
        "What PyTorch's allocator had given out at the highest moment of a step that was watched. Saved activations: "
        "what a forward has saved for the backward. Workspace: results that nothing saved, gradients on their way, "
        "temporaries."
    )
    columns = ("group", "peak", *(WORDS[part] for part in PARTS))
    return Grid("Memory of one step at its peak", columns, tuple(rows), note)
