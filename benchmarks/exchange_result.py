"""What the runs of `exchange.py` say of the exchange rate, by the rules of `docs/results/exchange/PROTOCOL.md`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml
from exchange_surface import (
    BATCH,
    FIRST_METHOD_SEED,
    STEPS,
    SURFACE_SEEDS,
    Losses,
    Prediction,
    Spread,
    batches,
    dense_name,
    find_rate,
    mean_after,
    pooled_deviation,
    predict_with_interval,
    read_losses,
    surface_mean,
)
from scipy.stats import rankdata, spearmanr
from thin import find_archive

# Dense with small batches scatters most, and predictions are read there.
MORE_SURFACE_SEEDS, SMALL_BATCHES = tuple(range(3, 10)), (1, 2, 4, 8)
FEW_ARMS = {"far-14m"}  # a run of this model takes four times as long
# Hypotheses that were written when a task was known, which is no test of them; see the protocol.
NO_TEST = {
    "spelling": ("H5", "H6", "H7", "H8", "H9", "H10"),
    "far": ("H9", "H10"),
    "far-1m": ("H10",),
    "novel": ("H10",),
}
# What git shows of the order in which a task's files were committed; see the protocol's corrections.
LATE = {
    "far": "15 of 17 shares of the rate were committed after its unbiased methods had been decided on this page (H7).",
    "far-1m": "Measurements, runs and results were committed together, after all of its methods had been trained.",
    "novel": "Measurements, runs and results were committed together, after its unbiased methods had been trained.",
}
# Both uniform policies and `importance`, whose gain never passed its threshold, draw examples uniformly: that is a
# smaller batch by construction.
UNIFORM_DRAWS = ("uniform-50", "uniform-25", "importance")
CLEAR_BIAS = 0.05  # of the variance between batches: above it a method counts as biased
FLAT, SHORTENED = 0.1, 0.85  # H8: of the noise by curvature at most, and of the share of the rate
CLOSE = 0.05  # nats, H9: what a choice before training may cost
BUDGET = 60.0  # dense steps of which the regret is taken

_ONE, _NONE = ({"value": value, "low": value, "high": value} for value in (1.0, 0.0))
DENSE = {"price": _ONE, "rate": _ONE, "noise": _NONE, "noise_curved": _NONE, "bias": _NONE, "product": _ONE}


@dataclass(frozen=True)
class Row:
    """One arm: what was predicted before it was trained, and what came out."""

    arm: str
    unbiased: bool  # by the derivation of its policy
    price: float
    noise: float
    bias: float
    bias_low: float
    product: float  # (1 + noise of all directions) x price, with the update
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
    def fair_product(self) -> float | None:
        """(1 + noise by curvature) x price; None of an arm that is clearly biased, or was not measured."""
        if self.noise_curved is None or self.bias_low > CLEAR_BIAS:
            return None
        return (1.0 + max(0.0, self.noise_curved)) * self.price

    @property
    def is_bracketed(self) -> bool | None:
        """Whether it came out between the two predictions and their intervals; None where one is missing."""
        if self.curved is None or self.high is None or self.observed is None:
            return None
        return self.curved.low <= self.observed <= self.high


def judge(losses: Losses, worth: Mapping[str, Any], methods: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """Return rows, scores and the outcomes of the hypotheses, all after the last step."""
    measured = {arm: about for arm, about in methods.items() if "refused" not in worth.get(arm, {"refused": ""})}
    means = {arm: find_spread(arm, losses, methods) for arm in measured if arm in losses}
    rows = [
        make_row(arm, bool(measured[arm]["unbiased"]), worth[arm], losses, rate, mean) for arm, mean in means.items()
    ]
    complete = [row for row in rows if row.predicted is not None and row.observed is not None]
    fair = [row for row in complete if row.unbiased]
    biased = [row for row in complete if row.bias_low > CLEAR_BIAS]
    best_batch, best_dense = find_best_dense(losses, rate)
    leads = {row.arm: lead for row in rows if (lead := find_lead(row, losses, best_dense, means[row.arm]))}
    beaten = [
        row.arm for row in rows if row.product_low > 1.0 and row.arm in leads and leads[row.arm][0] > leads[row.arm][1]
    ]
    curved = [row for row in rows if row.unbiased and row.surprise_curved is not None]
    both = [row for row in curved if row.surprise is not None]
    bracketed = [row for row in both if row.is_bracketed]
    r2, r2_curved = explained(fair), explained(curved, "surprise_curved")
    ratio = root_mean_square(both, "surprise_curved") / max(root_mean_square(both), 1e-9) if both else None
    rated = [row for row in rows if row.unbiased and row.surprise_rated is not None]
    r2_rated, way_back = explained(rated, "surprise_rated"), find_way_back(rows, losses)
    missing = [
        arm for arm in methods if "refused" not in worth.get(arm, {}) and not {arm} <= worth.keys() & losses.keys()
    ]
    order = None if missing else rank_correlation(rows)  # of a part of the arms it says nothing
    fair_regret = None if missing else find_regret(rows, losses, "fair_product")
    advice = None if missing else find_advice(rows, losses, worth)
    above = [row.arm for row in biased if (row.surprise or 0.0) > 0.0]
    return {
        "rows": [
            asdict(row) | {name: getattr(row, name) for name in ("surprise", "surprise_curved", "surprise_rated")}
            for row in rows
        ],
        "refused": {arm: about["refused"] for arm, about in worth.items() if "refused" in about},
        "missing": missing,
        "unpredicted": [row.arm for row in rows if row.predicted is None],
        "surface": {str(b): mean_after(losses.get(dense_name(b, rate), {}), STEPS) for b in batches(losses, rate)},
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
            "advice": advice,
            "beat_their_verdict": beaten,
            "best_dense": {"batch": best_batch, "loss": fmean(best_dense)},
            "below_best_dense": leads,
            "r2_curved": r2_curved,
            **score_methods(curved, surface_mean(losses, BATCH, rate, STEPS)),
            "root_mean_square_curved": root_mean_square(curved, "surprise_curved") if curved else None,
            "curved": len(curved),
            "ratio_curved": ratio,
            "both": len(both),
            "bracketed": len(bracketed),
            "r2_rated": r2_rated,
            "root_mean_square_rated": root_mean_square(rated, "surprise_rated") if rated else None,
            "rated": len(rated),
            # The same arms without the rate: H7 compares these, and some arms have one prediction alone.
            "r2_unrated": explained(rated, "surprise_curved"),
            "root_mean_square_unrated": root_mean_square(rated, "surprise_curved") if rated else None,
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
            "H10": None if advice is None else advice["gain"] > 0.0,
        },
    }


def score_methods(curved: Sequence[Row], dense: float | None) -> dict[str, Any]:
    """Return how well noise by curvature predicts methods, beside the prediction that every method equals dense.
    Uniform draws of examples are no methods here: they are a smaller batch. The order is that of all but dense."""
    methods = [row for row in curved if row.arm != "dense"]
    rows = [row for row in methods if row.arm not in UNIFORM_DRAWS]
    by_curvature = [row.curved.value for row in methods if row.curved is not None]
    observed = [row.observed for row in methods]
    # A rank correlation of equal numbers is not defined.
    is_ordered = len(methods) > 2 and len({*by_curvature}) > 1 and len({*observed}) > 1
    order = spearmanr(by_curvature, observed).statistic if is_ordered else None
    as_dense = [(row.observed or 0.0) - dense for row in rows if dense is not None]
    return {
        "methods": len(rows),
        "r2_methods": explained(rows, "surprise_curved"),
        "root_mean_square_methods": root_mean_square(rows, "surprise_curved") if rows else None,
        "root_mean_square_as_dense": math.sqrt(fmean(by**2 for by in as_dense)) if as_dense else None,
        "spearman_curved": None if order is None else float(order),
    }


def find_spread(arm: str, losses: Losses, methods: Mapping[str, Any]) -> Spread:
    """Return how sure the mean of an arm is. Unbiased arms pool their deviations; a biased one has its own, since one
    that breaks down on some seeds (`lcsb`: 1.3 nats, where unbiased arms have 0.03) would widen the others' intervals
    tenfold."""
    pooled = pooled_deviation({name: losses[name] for name in methods if methods[name]["unbiased"] and name in losses})
    own = pooled_deviation({arm: losses[arm]})
    deviation, freedom = pooled if methods[arm]["unbiased"] or own[1] == 0 else own
    return Spread(deviation, freedom, len(losses[arm]))


def make_row(arm: str, unbiased: bool, worth: Mapping[str, Any], losses: Losses, rate: float, mean: Spread) -> Row:
    """Return the row of an arm that was trained."""
    noise = worth["noise"]
    runs = losses[arm]
    main = predict_with_interval(losses, rate, noise, mean)
    curved, share = worth.get("noise_curved"), worth.get("rate")
    product = worth.get("product_all_directions", worth["product"])  # format 1 had no other name for it
    return Row(
        arm,
        unbiased,
        worth["price"]["value"],
        noise["value"],
        worth["bias"]["value"],
        worth["bias"]["low"],
        product["value"],
        product["low"],
        BATCH / (1 + max(0.0, noise["value"])),
        main and main.value,
        main and main.low,
        main and main.high,
        mean_after(runs, STEPS),
        len(runs),
        curved and curved["value"],
        curved and predict_with_interval(losses, rate, curved, mean),
        share and share["value"],
        curved and share and predict_with_interval(losses, rate, curved, mean, share),
        mean_after(losses.get(rated_name(arm), {}), STEPS),
    )


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


def find_regret(rows: Sequence[Row], losses: Losses, product: str = "product") -> dict[str, Any] | None:
    """Return what choosing the arm with the smallest product costs beside choosing by training, at the price of the
    budget, and what always choosing dense costs."""
    there = {row.arm: at_price(row, losses) for row in rows if row.observed is not None}
    products = {row.arm: getattr(row, product) for row in rows if row.arm in there}
    offered = {arm: value for arm, value in products.items() if value is not None}
    if not offered:
        return None
    chosen, best = min(offered, key=lambda arm: offered[arm]), min(there, key=lambda arm: there[arm])
    dense = there["dense"] - there[best] if "dense" in there else None
    return {"chosen": chosen, "best": best, "nats": there[chosen] - there[best], "dense_nats": dense}


def find_advice(rows: Sequence[Row], losses: Losses, worth: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what one gains beside dense, at the price of the budget, by training the arm with the smallest product by
    curvature of those of which it was said before that they *could* win; None where that was said of none. One that
    diverged loses without end."""
    dense = next((row for row in rows if row.arm == "dense" and row.observed is not None), None)
    products = {row.arm: row.fair_product for row in rows if worth[row.arm].get("verdict") == "could"}
    offered = {arm: value for arm, value in products.items() if value is not None}
    if dense is None or not offered:
        return None
    chosen = next(row for row in rows if row.arm == min(offered, key=lambda arm: offered[arm]))
    there = math.inf if chosen.observed is None else at_price(chosen, losses)
    return {"chosen": chosen.arm, "named": sorted(offered), "gain": at_price(dense, losses) - there}


def at_price(row: Row, losses: Losses) -> float:
    """Return an arm's mean loss at the price of the budget."""
    return fmean(loss_at(run, min(BUDGET / row.price, STEPS)) for run in losses[row.arm].values())


def find_way_back(rows: Sequence[Row], losses: Losses) -> dict[str, Any] | None:
    """Return how much of their distance to dense the arms of H8 lose at the rate over their share, by the seeds that
    were trained at both rates."""
    distances = {}
    for row in rows:
        rated = losses.get(rated_name(row.arm), {})
        runs = [
            [seeds[seed].get(STEPS) for seed in rated if seed in seeds]
            for seeds in (losses.get("dense", {}), losses[row.arm], rated)
        ]
        if rated and all(len(own) == len(rated) and None not in own for own in runs):
            dense, before, after = map(fmean, runs)
            distances[row.arm] = (before - dense, after - dense)
    before, after = (fmean(ends) for ends in zip(*distances.values(), strict=True)) if distances else (0.0, 0.0)
    if before <= 0.0:
        return None
    return {"arms": [*distances], "before": before, "after": after, "share": 1.0 - after / before}


def find_best_dense(losses: Losses, rate: float) -> tuple[int, list[float]]:
    """Return dense's best batch at the price of the budget, and the losses of its seeds there."""
    cells = {
        b: [loss_at(run, min(BUDGET * BATCH / b, STEPS)) for run in losses[dense_name(b, rate)].values()]
        for b in batches(losses, rate)
        if surface_mean(losses, b, rate, STEPS) is not None
    }
    return min(cells.items(), key=lambda cell: fmean(cell[1]))


def find_lead(row: Row, losses: Losses, dense: Sequence[float], mean: Spread) -> tuple[float, float] | None:
    """Return how far an arm is below dense's best batch at the price of the budget, and half of that interval; None if
    it is not, or diverged."""
    if row.observed is None:
        return None
    mine = fmean(loss_at(run, min(BUDGET / row.price, STEPS)) for run in losses[row.arm].values())
    lead = fmean(dense) - mine
    return (lead, mean.half_width(stdev(dense) / math.sqrt(len(dense)))) if lead > 0.0 else None


def read_arms(folder: Path, task: str) -> dict[str, Any]:
    """Return the arms of a task: those of `methods.yaml`, of which a large model has a few."""
    arms: dict[str, Any] = yaml.safe_load((folder / "methods.yaml").read_text(encoding="utf-8"))
    return {arm: about for arm, about in arms.items() if task not in FEW_ARMS or about.get("few")}


def read_task(folder: Path, name: str) -> dict[str, Any]:
    """Return what a task's runs and measurements say."""
    worth = json.loads((folder / f"{name}-worth.json").read_text(encoding="utf-8"))
    methods = read_arms(folder, name)
    losses = read_losses(find_archive(folder / name))
    rate = find_rate(losses)
    losses = hide_part(losses, {arm: methods[arm] for arm in methods if "refused" not in worth.get(arm, {})})
    # Dense as an arm whose noise is 0: the fresh seeds of the cell that the surface has with others.
    fresh = {seed: run for seed, run in losses[dense_name(BATCH, rate)].items() if seed >= FIRST_METHOD_SEED}
    about = {"task": name, "rate": rate, "no_test": NO_TEST.get(name, ()), "late": LATE.get(name, "")}
    return about | judge(
        {**losses, "dense": fresh} if fresh else losses,
        {"dense": DENSE} | worth,
        {"dense": {"unbiased": True}} | methods,
        rate,
    )


def hide_part(losses: Losses, methods: Mapping[str, Any]) -> Losses:
    """Return only dense's runs until every unbiased arm has its first seeds, no biased arm until all of them have, and
    of each arm the seeds that all have: nobody looks at a part of a step."""

    def is_whole(*, unbiased: bool) -> bool:
        arms = [arm for arm, about in methods.items() if about["unbiased"] == unbiased]
        return all(len(losses.get(arm, {})) >= len(SURFACE_SEEDS) for arm in arms)

    looked_at: list[str] = []
    if is_whole(unbiased=True):
        looked_at = [arm for arm in methods if methods[arm]["unbiased"] or is_whole(unbiased=False)]
    seeds = set.intersection(*(set(losses[arm]) for arm in looked_at)) if looked_at else set()
    return {
        name: {seed: run for seed, run in runs.items() if seed < FIRST_METHOD_SEED or seed in seeds}
        for name, runs in losses.items()
        if name not in methods or name in looked_at
    }
