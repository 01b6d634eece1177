"""The exchange rate of a method and dense's batch: figures by hand, and intervals that hold what they promise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparsebp_lab.exchange import (
    BatchPair,
    DenseStepCost,
    RateInterval,
    combine,
    estimate_share,
    give_verdict,
    price_against_batch,
)

SURE = RateInterval.exactly


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.8])
@pytest.mark.parametrize("update", [0.0, 0.3])
def test_uniform_examples_are_worth_exactly_their_price(share: float, update: float) -> None:
    """A share p drawn uniformly has the noise 1 / p - 1 and costs p of the passes, and the whole update."""
    policy, dense = DenseStepCost(share, update), DenseStepCost(1.0, update)
    assert price_against_batch(1 / share - 1, policy, dense) == pytest.approx(1.0)


def test_without_an_update_it_is_the_product_of_the_law() -> None:
    assert price_against_batch(1.5, DenseStepCost(0.6, 0.0), DenseStepCost(1.0, 0.0)) == pytest.approx(2.5 * 0.6)


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_intervals_hold_the_truth_as_often_as_they_say(spread: float) -> None:
    """Errors of a known size on gradients of a known variance: 3 points of 3 pairs, two draws on the first batch of
    each, as a measurement has them. With a spread batches have gradients of different size, and errors with them: then
    intervals are narrower for knowing how large the gradient of the other batch is."""
    random, held, rounds = np.random.default_rng(0), 0, 400
    widths: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        points = []
        for scale in (3.0, 1.0, 0.5):  # the variance between batches changes over a training, the share does not
            size = np.exp(spread * random.normal(size=(3, 2, 1))) * scale
            gradient = random.normal(size=(3, 2, 64)) * size
            error = (random.normal(size=(3, 2, 64)) * np.sqrt(0.7) + 0.4) * size[:, :1]
            points.append([_make_pair(g, e) for g, e in zip(gradient, error, strict=True)])
        noise = estimate_share(points, lambda pair: pair.noise)
        alone = estimate_share([[replace(p, first=1.0, mean=1.0) for p in each] for each in points], lambda p: p.noise)
        held += noise.low <= 0.7 <= noise.high
        for key, interval in ((True, noise), (False, alone)):
            widths[key].append(interval.high - interval.low)
    assert 0.90 <= held / rounds <= 0.99
    assert np.median(widths[True]) < np.median(widths[False]) * (0.7 if spread else 1.2)


def _make_pair(g: np.ndarray, e: np.ndarray) -> BatchPair:
    return BatchPair(
        between=float(((g[0] - g[1]) ** 2).sum() / 2),
        noise=float(((e[0] - e[1]) ** 2).sum() / 2),
        bias=float((e[0] * e[1]).sum()),
        first=float((g[0] ** 2).sum()),
        mean=float((g**2).sum() / 2),
    )


def test_the_price_is_a_ratio_of_sums_with_the_error_of_its_residuals() -> None:
    assert RateInterval.of_ratio([(1.0, 2.0)]) == SURE(0.5)
    assert RateInterval.of_ratio([(1.0, 2.0), (3.0, 6.0)]) == SURE(0.5)  # batches differ, the ratio does not
    wide = RateInterval.of_ratio([(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)])
    assert wide.value == pytest.approx(1.0)
    assert wide.high - wide.value == pytest.approx(4.3027 * 0.5 / 3**0.5, rel=1e-4)  # Student, two degrees of freedom


@pytest.mark.parametrize(
    ("noise", "price", "bias", "claims", "verdict"),
    [
        (SURE(0.0), SURE(1.0), SURE(0.0), {"exact": True, "unbiased": True}, "dense"),
        (SURE(0.0), SURE(0.5), SURE(0.0), {"exact": True, "unbiased": True}, "could"),
        (SURE(0.0), SURE(1.2), SURE(0.0), {"exact": True, "unbiased": True}, "cannot beat a smaller batch"),
        (
            RateInterval(1, 0.9, 1.1),
            SURE(0.8),
            SURE(0.0),
            {"exact": False, "unbiased": True},
            "cannot beat a smaller batch",
        ),
        (RateInterval(1, 0.8, 1.2), SURE(0.5), SURE(0.0), {"exact": False, "unbiased": True}, "decide by training"),
        (RateInterval(0.2, 0.1, 0.3), SURE(0.5), SURE(0.0), {"exact": False, "unbiased": True}, "could"),
        (
            RateInterval(0.2, 0.1, 0.3),
            SURE(0.5),
            RateInterval(0, -0.2, 0.2),
            {"exact": False, "unbiased": True},
            "could",
        ),
        (
            RateInterval(0.2, 0.1, 0.3),
            SURE(0.5),
            RateInterval(0, -0.2, 0.2),
            {"exact": False, "unbiased": False},
            "decide by training",
        ),
        (
            RateInterval(0.2, 0.1, 0.3),
            SURE(0.5),
            RateInterval(0.3, 0.2, 0.4),
            {"exact": False, "unbiased": True},
            "decide by training",
        ),
        (
            RateInterval(1, 0.9, 1.1),
            SURE(0.8),
            RateInterval(9, 8, 10),
            {"exact": False, "unbiased": False},
            "cannot beat a smaller batch",
        ),
    ],
)
def test_the_verdict_follows_from_intervals(
    noise: RateInterval, price: RateInterval, bias: RateInterval, claims: dict[str, bool], verdict: str
) -> None:
    product = combine(noise, price, DenseStepCost(price.value, 0.0), DenseStepCost(1.0, 0.0))
    assert give_verdict(product, noise, bias, **claims) == verdict
