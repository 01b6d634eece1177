"""What the runs of `cause.py` say, by the rules of `docs/results/cause/PROTOCOL.md`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from scipy.stats import spearmanr, t

BATCH = 16
BATCHES = (16, 12, 8, 4, 2, 1)
SHAPES = ("batch", "isotropic", "projection")
LEVELS = (0.01, 0.1, 1)  # of variance by curvature, over that between batches
BATCH_LEVELS = (1, 3)  # of the batch's own noise: dense's batches of 8 and 4
SHARES = (0.5, 0.25, 0.1, 0.0)  # of the rate, of dense with the whole batch
EXTRA = 100  # added to a round's number: the seed of dense's second run
LOW, HIGH = 0.75, 1.33  # of the rise of the loss over the one expected: on dense's curve
NARROW = 0.33  # half of the widest interval of which *on* is said

Rise = dict[int, float]  # by round
Losses = Mapping[str, Mapping[int, float]]


def judge(measured: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the outcome of each task and of all."""
    losses: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        losses.setdefault(run["task"], {}).setdefault(run["arm"], {})[int(run["seed"])] = float(run["loss"])
    roots = {(run["task"], run["arm"], int(run["seed"])): float(run["log_root"]) for run in runs}
    rounds = find_rounds(losses)
    tasks = {}
    for name, of_task in losses.items():
        tasks[name] = judge_task(measured[name], of_task, rounds)
        tasks[name]["shrunk"] = {
            arm: math.exp(fmean(roots[name, f"dense-{BATCH}", r] - roots[name, arm, r] for r in rounds))
            for arm in of_task
        }
    return {"rounds": len(rounds), "tasks": tasks, "verdict": decide_all([one["verdict"] for one in tasks.values()])}


def find_rounds(losses: Mapping[str, Losses]) -> list[int]:
    """Return the rounds of which every task has every arm."""
    arms = {arm for of_task in losses.values() for arm in of_task}
    number = 0
    while all(
        number in found.get(arm, {}) and (not arm.startswith("dense") or number + EXTRA in found[arm])
        for found in losses.values()
        for arm in arms
    ):
        number += 1
    return list(range(number))


def judge_task(measured: Mapping[str, Any], losses: Losses, rounds: Sequence[int]) -> dict[str, Any]:
    """Return slopes with their outcomes, the scores of predictors, and the verdict of a task."""
    rises = {arm: find_rise(losses, arm, rounds) for arm in losses}
    slopes = {shape: find_slope(shape, "", rises) for shape in SHAPES}
    is_on = {shape: slope["outcome"] for shape, slope in slopes.items()}
    if is_on["batch"] != "on":
        verdict = "no test"
    elif "off" in is_on.values():
        verdict = "refused"
    else:
        verdict = "cause" if set(is_on.values()) == {"on"} else "open"
    return {
        "verdict": verdict,
        "dense": {str(size): fmean(seeds(losses, size, rounds)) for size in BATCHES},
        "deviation": stdev(losses[f"dense-{BATCH}"][r] for r in rounds) if len(rounds) > 1 else None,
        "slopes": slopes,
        "first": {shape: find_slope(shape, "-first", rises) for shape in SHAPES},
        "second": {shape: find_share(shape, rises) for shape in SHAPES},
        "rises": {arm: mean_and_error(list(rise.values())) for arm, rise in rises.items()},
        "predictors": score_predictors(measured, losses, rises, rounds),
    }


def seeds(losses: Losses, size: int, rounds: Sequence[int]) -> list[float]:
    """Return dense's losses with a batch, of both seeds of each round."""
    return [losses[f"dense-{size}"][seed] for r in rounds for seed in (r, r + EXTRA)]


def find_rise(losses: Losses, arm: str, rounds: Sequence[int]) -> Rise:
    """Return by round how far an arm's loss is above dense's with the whole batch and the same examples."""
    base, own = losses[f"dense-{BATCH}"], losses[arm]
    pairs = {r: [r, r + EXTRA] if arm.startswith("dense") else [r] for r in rounds}
    return {r: fmean(own[seed] - base[seed] for seed in of_round) for r, of_round in pairs.items()}


def find_curve(rises: Mapping[str, Rise], rounds: Sequence[int]) -> dict[int, float]:
    """Return dense's rises by batch."""
    return {size: fmean(rises[f"dense-{size}"][r] for r in rounds) for size in BATCHES}


def find_slope(shape: str, moment: str, rises: Mapping[str, Rise]) -> dict[str, Any]:
    """Return the rise of a shape's levels over that of dense with as much variance, as the slope of a line through
    zero: with the noise in both moments, or in the one that the name of the arm ends with."""
    all_levels = BATCH_LEVELS if shape == "batch" else LEVELS
    levels = [level for level in all_levels if f"{shape}-{level}{moment}" in rises]

    def slope(rounds: Sequence[int]) -> float:
        curve = find_curve(rises, rounds)
        expected = [predict(curve, level) for level in levels]
        own = [fmean(rises[f"{shape}-{level}{moment}"][r] for r in rounds) for level in levels]
        return sum(a * b for a, b in zip(own, expected, strict=True)) / sum(b * b for b in expected)

    return decide(*jackknife(slope, list(rises[f"{shape}-{levels[0]}{moment}"])))


def find_share(shape: str, rises: Mapping[str, Rise]) -> dict[str, Any]:
    """Return the rise with the noise in the second moment alone over that with it in both, at one level."""
    level = 1 if shape == "batch" else 0.1
    second, both = rises[f"{shape}-{level}-second"], rises[f"{shape}-{level}"]
    return decide(*jackknife(lambda rs: fmean(second[r] for r in rs) / fmean(both[r] for r in rs), list(both)))


def jackknife(of: Callable[[Sequence[int]], float], rounds: Sequence[int]) -> tuple[float, float]:
    """Return a value over all rounds, and half of its 95 % interval by leaving out each of them."""
    value, number = of(rounds), len(rounds)
    if number < 2:
        return value, math.inf
    parts = [of([r for r in rounds if r != left_out]) for left_out in rounds]
    variance = (number - 1) / number * sum((part - fmean(parts)) ** 2 for part in parts)
    return value, float(t.ppf(0.975, number - 1)) * math.sqrt(variance)


def decide(value: float, error: float) -> dict[str, Any]:
    """Return a value with its interval, and whether it is on dense's curve."""
    low, high = value - error, value + error
    is_on = LOW <= value <= HIGH and error <= NARROW
    outcome = "off" if low > HIGH or high < LOW else "on" if is_on else "open"
    return {"value": value, "low": low, "high": high, "outcome": outcome}


def mean_and_error(values: Sequence[float]) -> dict[str, float | None]:
    """Return a mean and its standard error."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": fmean(values), "error": error}


def decide_all(verdicts: Sequence[str]) -> str:
    """Return the verdict over all tasks."""
    if "refused" in verdicts:
        return "refused"
    return "cause" if set(verdicts) == {"cause"} else "open"


def score_predictors(
    measured: Mapping[str, Any], losses: Losses, rises: Mapping[str, Rise], rounds: Sequence[int]
) -> dict[str, Any]:
    """Return how well each measure of noise says the rise, over added noise and over methods."""
    curve = find_curve(rises, rounds)
    slow = {1.0: 0.0} | {share: fmean(rises[f"slow-{share}"][r] for r in rounds) for share in SHARES}
    methods = [arm for arm in losses if arm.partition("-")[0] not in (*SHAPES, "dense", "slow")]
    added = [f"{shape}-{n}" for shape in SHAPES if shape != "batch" for n in LEVELS]
    noise = {arm: find_noise(measured, arm) for arm in (*added, *methods)}
    found: dict[str, Any] = {"noise": noise}
    for group, arms in (("added", added), ("methods", methods)):
        observed = [fmean(rises[arm].values()) for arm in arms]
        said = {kind: [predict(curve, noise[arm][kind]) for arm in arms] for kind in ("curved", "all")}
        rates = [noise[arm]["rate"] / rate_of_batch(measured, noise[arm]["curved"]) for arm in arms]
        said["curved and rate"] = [
            rise + predict_slow(slow, rate) for rise, rate in zip(said["curved"], rates, strict=True)
        ]
        said["as dense"] = [0.0] * len(arms)
        found[group] = {
            kind: {
                "root_mean_square": root_mean_square([a - b for a, b in zip(observed, rise, strict=True)]),
                "spearman": None if kind == "as dense" or len(arms) < 3 else float(spearmanr(rise, observed).statistic),
            }
            for kind, rise in said.items()
        }
        found[f"{group}_predicted"] = {kind: dict(zip(arms, rise, strict=True)) for kind, rise in said.items()}
    return found


def predict_slow(slow: Mapping[float, float], share: float) -> float:
    """Return the rise of dense with a share of the rate, linear between those that were trained."""
    wanted = min(1.0, max(0.0, share))
    for high, low in pairwise(sorted(slow, reverse=True)):
        if wanted >= low:
            return slow[low] + (slow[high] - slow[low]) * (wanted - low) / (high - low)
    return slow[0.0]


def rate_of_batch(measured: Mapping[str, Any], noise: float) -> float:
    """Return the share of the rate of the batch of dense with so much noise; dense's curve has it in it."""
    points = [point["rates"] for point in measured["points"].values()]
    rates = {size: fmean(point[f"dense-{size}"] for point in points) for size in BATCHES}
    return predict(rates, noise)


def predict(curve: Mapping[int, float], noise: float) -> float:
    """Return dense's rise at the batch with so much noise, linear in the logarithm; below a batch of 1, that of 1."""
    wanted = max(1.0, BATCH / (1.0 + max(0.0, noise)))
    for large, small in pairwise(BATCHES):
        if wanted >= small:
            there = math.log(large / wanted) / math.log(large / small)
            return curve[large] + (curve[small] - curve[large]) * there
    return curve[BATCHES[-1]]


def find_noise(measured: Mapping[str, Any], arm: str) -> dict[str, float]:
    """Return the variance of an arm over that between batches, in all directions of Adam's metric and by curvature, and
    the share of the rate that it leaves."""
    points = list(measured["points"].values())
    shape, _, level = arm.partition("-")
    is_added = shape in SHAPES
    name, times = (shape, float(level)) if is_added else (arm, 1.0)

    def total(point: Mapping[str, Any], key: str, kind: str) -> float:
        return fmean(one[kind] for one in point[key])

    def unit(point: Mapping[str, Any]) -> float:
        return total(point, "batch-of-16", "curved") / total(point, name, "curved") if is_added else 1.0

    def ratio(kind: str) -> float:
        between = sum(total(p, "batch-of-16", kind) for p in points)
        return times * sum(unit(p) * total(p, name, kind) for p in points) / between

    rate = fmean(point["rates"][arm] for point in points)
    return {"all": ratio("plain"), "curved": ratio("curved"), "rate": min(1.0, max(0.0, rate))}


def root_mean_square(values: Sequence[float]) -> float:
    """Return the root of the mean square."""
    return math.sqrt(fmean(value * value for value in values))
