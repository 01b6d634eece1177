"""What the runs of `exchange.py` say of the exchange rate, by the rules of `docs/results/exchange/PROTOCOL.md`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from scipy.stats import rankdata, spearmanr
from scipy.stats import t as student

METRIC, STEPS, BATCH = "eval/loss", 120, 16
SURFACE_SEEDS, FIRST_METHOD_SEED = (0, 1, 2), 100
# Dense with small batches scatters most, and predictions are read there.
MORE_SURFACE_SEEDS, SMALL_BATCHES = tuple(range(3, 10)), (1, 2, 4, 8)
LEVEL = 0.95
DENSE_NAME = "dense-b"  # what the names of all cells of dense's surface begin with
FEW_ARMS = {"far-14m"}  # a run of this model takes four times as long
FOUND_ON = "spelling"  # the task on which H5 and H6 were found; see the protocol
CHOSEN_ON = {"spelling", "far"}  # those that were known when H9 was written
CLEAR_BIAS = 0.05  # of the variance between batches: above it a method counts as biased
FLAT, SHORTENED = 0.1, 0.85  # H8: of the noise by curvature at most, and of the share of the rate
CLOSE = 0.05  # nats, H9: what a choice before training may cost
BUDGET = 60.0  # dense steps of which the regret is taken

_ONE, _NONE = ({"value": value, "low": value, "high": value} for value in (1.0, 0.0))
DENSE = {"price": _ONE, "rate": _ONE, "noise": _NONE, "noise_curved": _NONE, "bias": _NONE, "product": _ONE}

Losses = Mapping[str, Mapping[int, Mapping[int, float]]]  # of each arm, by seed and step; no steps: it diverged


@dataclass(frozen=True)
class Prediction:
    """A loss read from dense's surface, with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One arm: what was predicted before it was trained, and what came out."""

    arm: str
    unbiased: bool  # by the derivation of its policy
    price: float
    noise: float
    bias: float
    bias_low: float
    product: float  # (1 + noise) x price, with the update
    product_low: float
    batch: float  # of dense with as much noise
    predicted: float | None  # None: that batch is below 1
    low: float | None
    high: float | None
    observed: float | None  # None: a run of it diverged
    seeds: int
    noise_curved: float | None = None  # with the curvature of the loss between; None: not measured
    curved: Prediction | None = None  # by it
    rate: float | None = None  # share of the rate that is left
    rated: Prediction | None = None  # by noise with curvature and the share of the rate
    rated_loss: float | None = None  # after a training at the rate over its share

    @property
    def surprise(self) -> float | None:
        """Observed minus predicted."""
        return None if self.predicted is None or self.observed is None else self.observed - self.predicted

    @property
    def surprise_curved(self) -> float | None:
        """Observed minus what the noise by curvature predicts."""
        return None if self.curved is None or self.observed is None else self.observed - self.curved.value

    @property
    def surprise_rated(self) -> float | None:
        """Observed minus what the noise by curvature and the share of the rate predict."""
        return None if self.rated is None or self.observed is None else self.observed - self.rated.value

    @property
    def is_bracketed(self) -> bool | None:
        """Whether it came out between the two predictions and their intervals; None where one is missing."""
        if self.curved is None or self.high is None or self.observed is None:
            return None
        return self.curved.low <= self.observed <= self.high


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


def judge(losses: Losses, worth: Mapping[str, Any], methods: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """Return rows, scores and the outcomes of the hypotheses, all after the last step."""
    rows = [
        row
        for arm, about in methods.items()
        if "refused" not in worth.get(arm, {"refused": ""})
        if (row := make_row(arm, bool(about["unbiased"]), worth[arm], losses, rate))
    ]
    complete = [row for row in rows if row.predicted is not None and row.observed is not None]
    fair = [row for row in complete if row.unbiased]
    biased = [row for row in complete if row.bias_low > CLEAR_BIAS]
    beaten = [row.arm for row in rows if row.product_low > 1.0 and beats_dense(row, losses, rate)]
    curved = [row for row in rows if row.unbiased and row.surprise_curved is not None]
    both = [row for row in curved if row.surprise is not None]
    bracketed = [row for row in both if row.is_bracketed]
    r2, r2_curved = explained(fair), explained(curved, "surprise_curved")
    ratio = root_mean_square(both, "surprise_curved") / max(root_mean_square(both), 1e-9) if both else None
    rated = [row for row in rows if row.unbiased and row.surprise_rated is not None]
    r2_rated, way_back = explained(rated, "surprise_rated"), find_way_back(rows)
    missing = [
        arm for arm in methods if "refused" not in worth.get(arm, {}) and not {arm} <= worth.keys() & losses.keys()
    ]
    order = None if missing else rank_correlation(rows)  # of a part of the arms it says nothing
    fair_regret = None if missing else find_regret(rows, losses, by_curvature=True)
    above = [row.arm for row in biased if (row.surprise or 0.0) > 0.0]
    return {
        "rows": [
            asdict(row) | {name: getattr(row, name) for name in ("surprise", "surprise_curved", "surprise_rated")}
            for row in rows
        ],
        "refused": {arm: about["refused"] for arm, about in worth.items() if "refused" in about},
        "missing": missing,
        "unpredicted": [row.arm for row in rows if row.predicted is None],
        "surface": {str(b): _mean(losses.get(dense_name(b, rate), {}), STEPS) for b in batches(losses, rate)},
        "scores": {
            "r2": r2,
            "root_mean_square": root_mean_square(fair) if fair else None,
            "unbiased": len(fair),
            "within": sum(_within(row) for row in fair),
            "spearman": order,
            "biased": len(biased),
            "biased_above": len(above),
            "regret": None if missing else find_regret(rows, losses),
            "fair_regret": fair_regret,
            "beat_their_verdict": beaten,
            "r2_curved": r2_curved,
            "root_mean_square_curved": root_mean_square(curved, "surprise_curved") if curved else None,
            "curved": len(curved),
            "ratio_curved": ratio,
            "both": len(both),
            "bracketed": len(bracketed),
            "r2_rated": r2_rated,
            "root_mean_square_rated": root_mean_square(rated, "surprise_rated") if rated else None,
            "rated": len(rated),
            "way_back": way_back,
        },
        "hypotheses": {
            "H1": None if r2 is None else r2 >= 0.9,
            "H2": None if missing or not biased else len(above) >= 0.8 * len(biased),
            "H3": None if order is None else order >= 0.8,
            "H4": False if beaten else None if missing or not rows else True,
            "H5": None if r2_curved is None or ratio is None else r2_curved >= 0.75 and ratio <= 0.5,
            "H6": None if not both else len(bracketed) >= 0.9 * len(both),
            "H7": None
            if r2_rated is None
            else r2_rated >= 0.9
            and root_mean_square(rated, "surprise_rated") < root_mean_square(rated, "surprise_curved"),
            "H8": None if way_back is None else way_back["share"] >= 0.5,
            "H9": None if fair_regret is None else fair_regret["nats"] <= CLOSE,
        },
    }


def make_row(arm: str, unbiased: bool, worth: Mapping[str, Any], losses: Losses, rate: float) -> Row | None:
    """Return the row of an arm; None before it was trained."""
    if arm not in losses:
        return None
    noise = worth["noise"]
    runs = losses[arm]
    main = predict_with_interval(losses, rate, noise, len(runs))
    curved, share = worth.get("noise_curved"), worth.get("rate")
    return Row(
        arm,
        unbiased,
        worth["price"]["value"],
        noise["value"],
        worth["bias"]["value"],
        worth["bias"]["low"],
        worth["product"]["value"],
        worth["product"]["low"],
        BATCH / (1 + max(0.0, noise["value"])),
        main and main.value,
        main and main.low,
        main and main.high,
        _mean(runs, STEPS),
        len(runs),
        curved and curved["value"],
        curved and predict_with_interval(losses, rate, curved, len(runs)),
        share and share["value"],
        curved and share and predict_with_interval(losses, rate, curved, len(runs), share),
        _mean(losses.get(rated_name(arm), {}), STEPS),
    )


def predict_with_interval(
    losses: Losses, rate: float, noise: Mapping[str, float], seeds: int, share: Mapping[str, float] | None = None
) -> Prediction | None:
    """Return :func:`predict` with the errors of noise and rate, the surface, and the mean over so many seeds."""
    # Noise does not lengthen a step, and the surface at higher rates comes late.
    share = {end: min(1.0, value) for end, value in (share or _ONE).items()}
    centre = predict(losses, rate * share["value"], noise["value"], STEPS)
    if centre is None:
        return None
    sd, freedom = pooled_deviation({arm: runs for arm, runs in losses.items() if not arm.startswith(DENSE_NAME)})
    error = math.hypot(_surface_error(losses, rate, noise["value"]), sd / math.sqrt(seeds))
    half = float(student.ppf(0.5 + LEVEL / 2, freedom)) * error
    below, above = half, half
    for ends in (
        [(noise[end], share["value"]) for end in ("low", "high")],
        [(noise["value"], share[end]) for end in ("high", "low")],
    ):
        moved = [predict(losses, rate * rate_end, noise_end, STEPS) for noise_end, rate_end in ends]
        low, high = (0.0 if end is None else end - centre for end in moved)
        below, above = math.hypot(below, min(low, high, 0.0)), math.hypot(above, max(low, high, 0.0))
    return Prediction(centre, centre - below, centre + above)


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


def find_rated(worth: Mapping[str, Any], unbiased: Sequence[str], rate: float) -> dict[str, float]:
    """Return the rates at which the arms of H8 are trained again: those whose noise only shortens their steps."""
    found = {}
    for arm in unbiased:
        about = worth.get(arm, {})
        curved, share = about.get("noise_curved"), about.get("rate")
        if curved and share and curved["value"] < FLAT and share["value"] < SHORTENED:
            found[arm] = float(f"{rate / share['value']:.2g}")
    return found


def rated_name(arm: str) -> str:
    """Return the name of an arm that is trained at the rate over its share."""
    return f"{arm}-at-its-rate"


def predict(losses: Losses, rate: float, noise: float, step: int) -> float | None:
    """Return dense's loss at a rate and the batch that has as much noise, linear in the logarithms of batch and rate
    between the nearest; None outside of them."""
    surface = {b: _surface_at(losses, b, rate, step) for b in sorted({b for b, _ in surface_cells(losses)})}
    return _read_between({b: loss for b, loss in surface.items() if loss is not None}, BATCH / (1.0 + max(0.0, noise)))


def _surface_at(losses: Losses, batch: int, rate: float, step: int) -> float | None:
    """Return the loss of a batch of the surface at a rate."""
    there = {own: _surface(losses, batch, own, step) for b, own in surface_cells(losses) if b == batch}
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


def _surface(losses: Losses, batch: int, rate: float, step: int) -> float | None:
    return _mean(_surface_runs(losses, batch, rate), step)


def _surface_runs(losses: Losses, batch: int, rate: float) -> dict[int, Mapping[int, float]]:
    runs = losses.get(dense_name(batch, rate), {})
    return {seed: run for seed, run in runs.items() if seed < FIRST_METHOD_SEED}


def _mean(runs: Mapping[int, Mapping[int, float]], step: int) -> float | None:
    """Return the mean loss of some runs; None if one of them diverged."""
    values = [losses.get(step) for losses in runs.values()]
    return fmean(values) if values and None not in values else None  # type: ignore[type-var]


def pooled_deviation(losses: Losses) -> tuple[float, int]:
    """Return the standard deviation of a run over seeds, pooled over all cells, and its degrees of freedom."""
    squares, freedom = 0.0, 0
    for runs in losses.values():
        values = [steps[STEPS] for steps in runs.values() if STEPS in steps]
        if len(values) > 1:
            mean = fmean(values)
            squares += sum((value - mean) ** 2 for value in values)
            freedom += len(values) - 1
    return math.sqrt(squares / freedom), freedom


def explained(rows: Sequence[Row], surprise: str = "surprise") -> float | None:
    """Return R² of observed against predicted, about the line of equality."""
    if len(rows) < 3:
        return None
    observed = [row.observed or 0.0 for row in rows]
    mean = fmean(observed)
    return 1.0 - sum(getattr(row, surprise) ** 2 for row in rows) / sum((value - mean) ** 2 for value in observed)


def root_mean_square(rows: Sequence[Row], surprise: str = "surprise") -> float:
    """Return that of observed minus predicted."""
    return math.sqrt(fmean(getattr(row, surprise) ** 2 for row in rows))


def rank_correlation(rows: Sequence[Row]) -> float | None:
    """Return Spearman's rho; an arm without a prediction is predicted as the last, one that diverged came out last."""
    if len(rows) < 3:
        return None
    last = float("inf")
    predicted = rankdata([last if row.predicted is None else row.predicted for row in rows])
    observed = rankdata([last if row.observed is None else row.observed for row in rows])
    return float(spearmanr(predicted, observed).statistic)


def _within(row: Row) -> bool:
    return row.observed is not None and (row.low or 0.0) <= row.observed <= (row.high or 0.0)


def loss_at(losses: Mapping[int, float], steps: float) -> float:
    """Return a run's loss after some steps, linear between its evaluations."""
    points = sorted(losses.items())
    for (left, first), (right, second) in pairwise(points):
        if left <= steps <= right:
            return first + (second - first) * (steps - left) / (right - left)
    return points[-1][1]


def find_regret(rows: Sequence[Row], losses: Losses, *, by_curvature: bool = False) -> dict[str, Any] | None:
    """Return what choosing by the smallest product costs beside choosing by training, at the price of the budget;
    by curvature among those that are not clearly biased."""
    there = {
        row.arm: fmean(loss_at(run, min(BUDGET / row.price, STEPS)) for run in losses[row.arm].values())
        for row in rows
        if row.observed is not None
    }
    if not there:
        return None
    trained = [row for row in rows if row.arm in there]
    if by_curvature:
        fair = [row for row in trained if row.bias_low <= CLEAR_BIAS and row.noise_curved is not None]
        if not fair:
            return None
        chosen = min(fair, key=lambda row: (1.0 + max(0.0, row.noise_curved or 0.0)) * row.price).arm
    else:
        chosen = min(trained, key=lambda row: row.product).arm
    best = min(there, key=lambda arm: there[arm])
    return {"chosen": chosen, "best": best, "nats": there[chosen] - there[best]}


def find_way_back(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return how much of their distance to dense the arms of H8 lose at the rate over their share."""
    dense = next((row.observed for row in rows if row.arm == "dense"), None)
    arms = [row for row in rows if row.rated_loss is not None and row.observed is not None]
    before = fmean((row.observed or 0.0) - (dense or 0.0) for row in arms) if arms else 0.0
    if dense is None or before <= 0.0:
        return None
    after = fmean((row.rated_loss or 0.0) - dense for row in arms)
    return {"arms": [row.arm for row in arms], "before": before, "after": after, "share": 1.0 - after / before}


def beats_dense(row: Row, losses: Losses, rate: float) -> bool:
    """Return whether an arm is lower than every batch of dense at the price of the budget, beyond the error."""
    if row.observed is None:
        return False
    mine = fmean(loss_at(run, min(BUDGET / row.price, STEPS)) for run in losses[row.arm].values())
    sd, freedom = pooled_deviation(losses)
    dense = min(
        fmean(loss_at(run, min(BUDGET * BATCH / b, STEPS)) for run in losses[dense_name(b, rate)].values())
        for b in batches(losses, rate)
        if _surface(losses, b, rate, STEPS) is not None
    )
    half = float(student.ppf(0.5 + LEVEL / 2, freedom)) * sd * math.sqrt(1 / len(SURFACE_SEEDS) + 1 / row.seeds)
    return mine - dense + half < 0.0


def read_arms(folder: Path, task: str) -> dict[str, Any]:
    """Return the arms of a task: those of `methods.yaml`, of which a large model has a few."""
    arms: dict[str, Any] = yaml.safe_load((folder / "methods.yaml").read_text(encoding="utf-8"))
    return {arm: about for arm, about in arms.items() if task not in FEW_ARMS or about.get("few")}


def read_task(folder: Path, name: str) -> dict[str, Any]:
    """Return what a task's archive and measurements say."""
    worth = json.loads((folder / f"{name}-worth.json").read_text(encoding="utf-8"))
    methods = read_arms(folder, name)
    losses = read_losses(folder / f"{name}.tar.gz")
    rate = find_rate(losses)
    losses = hide_part(losses, {arm: methods[arm] for arm in methods if "refused" not in worth.get(arm, {})})
    # Dense as an arm whose noise is 0: the fresh seeds of the cell that the surface has with others.
    fresh = {seed: run for seed, run in losses[dense_name(BATCH, rate)].items() if seed >= FIRST_METHOD_SEED}
    return {"task": name, "rate": rate, "found_here": name == FOUND_ON, "chosen_here": name in CHOSEN_ON} | judge(
        {**losses, "dense": fresh} if fresh else losses,
        {"dense": DENSE} | worth,
        {"dense": {"unbiased": True}} | methods,
        rate,
    )


def hide_part(losses: Losses, methods: Mapping[str, Any]) -> Losses:
    """Return only dense's runs until every unbiased arm has its first seeds, no biased arm until all of them have, and
    of each arm as many seeds as all have: nobody looks at a part of a step."""
    seeds = {arm: sorted(losses.get(arm, {})) for arm in methods}
    whole = {
        kind: all(len(seeds[arm]) >= len(SURFACE_SEEDS) for arm, about in methods.items() if about["unbiased"] == kind)
        for kind in (True, False)
    }
    if not whole[True]:
        return {
            name: {seed: run for seed, run in runs.items() if seed < FIRST_METHOD_SEED}
            for name, runs in losses.items()
            if name not in methods
        }
    looked_at = [arm for arm, about in methods.items() if whole[about["unbiased"]]]
    common = set.intersection(*(set(seeds[arm]) for arm in looked_at))
    fresh = {seed for seed in common if seed >= FIRST_METHOD_SEED}
    return {
        name: {seed: run for seed, run in runs.items() if seed < FIRST_METHOD_SEED or seed in fresh}
        for name, runs in losses.items()
        if name not in methods or name in looked_at
    }


def find_rate(losses: Losses) -> float:
    """Return the rate whose dense runs have the lowest mean loss at the methods' batch, on the seeds of the surface."""
    found = (re.fullmatch(rf"dense-b{BATCH}-r(.+)", arm) for arm in losses)
    means = {float(match[1]): _surface(losses, BATCH, float(match[1]), STEPS) for match in found if match}
    return min((mean, rate) for rate, mean in means.items() if mean is not None)[1]
