"""Dense's surface of the exchange rate: its losses over batches and rates, and what they predict of a noise."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from scipy.stats import t as student

METRIC, STEPS, BATCH = "eval/loss", 120, 16
SURFACE_SEEDS, FIRST_METHOD_SEED = (0, 1, 2), 100
LEVEL = 0.95
DENSE_NAME = "dense-b"  # what the names of all cells of dense's surface begin with

Losses = Mapping[str, Mapping[int, Mapping[int, float]]]  # of each arm, by seed and step; no steps: it diverged


@dataclass(frozen=True)
class Prediction:
    """A loss read from dense's surface, with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Spread:
    """How sure the mean over some seeds is."""

    deviation: float  # of one run over seeds
    freedom: int  # degrees, of the deviation
    seeds: int

    def half_width(self, other: float) -> float:
        """Return half of the interval of the mean's difference to something with another standard error."""
        error = math.hypot(other, self.deviation / math.sqrt(self.seeds))
        return float(student.ppf(0.5 + LEVEL / 2, self.freedom)) * error


def read_losses(archive: Path) -> Losses:
    """Return the losses of an archive's runs by arm."""
    from sparsebp_cli.compare.archive import open_archive
    from sparsebp_cli.compare.load import load_folder
    from sparsebp_cli.run import RunFolder

    found: dict[str, dict[int, dict[int, float]]] = {}
    for plan in sorted((open_archive(archive) / "runs").glob("*/plan.json")):
        run = load_folder(RunFolder(plan.parent))
        if run.seed is not None and (run.finished or run.broke_down):
            found.setdefault(run.name, {})[run.seed] = dict(run.series(METRIC)) if run.finished else {}
    return found


def find_rate(losses: Losses) -> float:
    """Return the rate whose dense runs have the lowest mean loss at the methods' batch, on the seeds of the surface."""
    found = (re.fullmatch(rf"dense-b{BATCH}-r(.+)", arm) for arm in losses)
    means = {float(match[1]): surface_mean(losses, BATCH, float(match[1]), STEPS) for match in found if match}
    return min((mean, rate) for rate, mean in means.items() if mean is not None)[1]


def predict_with_interval(
    losses: Losses,
    rate: float,
    noise: Mapping[str, float],
    mean: Spread,
    share: Mapping[str, float] | None = None,
) -> Prediction | None:
    """Return :func:`predict` with the errors of noise and rate, the surface, and the mean that it is held against."""
    # Noise does not lengthen a step, and the surface at higher rates comes late.
    share = {end: min(1.0, value) for end, value in (share or dict.fromkeys(("value", "low", "high"), 1.0)).items()}
    centre = predict(losses, rate * share["value"], noise["value"], STEPS)
    if centre is None:
        return None
    half = mean.half_width(_surface_error(losses, rate, noise["value"]))
    below, above = half, half
    for ends in (
        [(noise[end], share["value"]) for end in ("low", "high")],
        [(noise["value"], share[end]) for end in ("high", "low")],
    ):
        moved = [predict(losses, rate * rate_end, noise_end, STEPS) for noise_end, rate_end in ends]
        low, high = (0.0 if end is None else end - centre for end in moved)
        below, above = math.hypot(below, min(low, high, 0.0)), math.hypot(above, max(low, high, 0.0))
    return Prediction(centre, centre - below, centre + above)


def predict(losses: Losses, rate: float, noise: float, step: int) -> float | None:
    """Return dense's loss at a rate and the batch that has as much noise, linear in the logarithms of batch and rate
    between the nearest; None outside of them."""
    surface = {b: _surface_at(losses, b, rate, step) for b in sorted({b for b, _ in surface_cells(losses)})}
    return _read_between({b: loss for b, loss in surface.items() if loss is not None}, BATCH / (1.0 + max(0.0, noise)))


def dense_name(batch: int, rate: float) -> str:
    """Return the name of a cell of dense's surface."""
    return f"{DENSE_NAME}{batch}-r{rate:g}"


def surface_cells(losses: Losses) -> set[tuple[int, float]]:
    """Return batch and rate of each cell of the surface."""
    found = (re.fullmatch(r"dense-b(\d+)-r(.+)", arm) for arm in losses)
    return {(int(match[1]), float(match[2])) for match in found if match}


def batches(losses: Losses, rate: float) -> list[int]:
    """Return the batches of the surface at a rate, smallest first."""
    return sorted(b for b, own in surface_cells(losses) if own == rate)


def _surface_at(losses: Losses, batch: int, rate: float, step: int) -> float | None:
    """Return the loss of a batch of the surface at a rate."""
    there = {own: surface_mean(losses, batch, own, step) for b, own in surface_cells(losses) if b == batch}
    if there.get(rate) is not None:
        return there[rate]
    return _read_between({own: loss for own, loss in there.items() if loss is not None}, rate)


def _read_between(points: Mapping[float, float], at: float) -> float | None:
    """Return the value between the two nearest points, linear in the logarithm of the place."""
    wanted = math.log2(at)
    for (left, first), (right, second) in pairwise(
        (math.log2(place), value) for place, value in sorted(points.items())
    ):
        if left <= wanted <= right:
            return first + (second - first) * (wanted - left) / (right - left)
    return None


def _surface_error(losses: Losses, rate: float, noise: float) -> float:
    """Return the standard error of a loss that is read from the surface: that of the two nearest batches, each by its
    own spread over seeds, since small batches scatter several times as much as large ones."""
    errors = {}
    for b in batches(losses, rate):
        values = [run[STEPS] for run in _surface_runs(losses, b, rate).values() if STEPS in run]
        if len(values) > 1:
            errors[b] = stdev(values) / math.sqrt(len(values))
    return _read_between(errors, BATCH / (1.0 + max(0.0, noise))) or 0.0


def surface_mean(losses: Losses, batch: int, rate: float, step: int) -> float | None:
    return mean_after(_surface_runs(losses, batch, rate), step)


def _surface_runs(losses: Losses, batch: int, rate: float) -> dict[int, Mapping[int, float]]:
    runs = losses.get(dense_name(batch, rate), {})
    return {seed: run for seed, run in runs.items() if seed < FIRST_METHOD_SEED}


def mean_after(runs: Mapping[int, Mapping[int, float]], step: int) -> float | None:
    """Return the mean loss of some runs; None if one of them diverged."""
    values = [losses.get(step) for losses in runs.values()]
    return fmean(values) if values and None not in values else None  # type: ignore[type-var]


def pooled_deviation(losses: Losses) -> tuple[float, int]:
    """Return the standard deviation of a run over seeds, pooled over all cells, and its degrees of freedom, 0 where no
    cell has two runs."""
    squares, freedom = 0.0, 0
    for runs in losses.values():
        values = [steps[STEPS] for steps in runs.values() if STEPS in steps]
        if len(values) > 1:
            mean = fmean(values)
            squares += sum((value - mean) ** 2 for value in values)
            freedom += len(values) - 1
    return math.sqrt(squares / max(1, freedom)), freedom
