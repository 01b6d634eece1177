"""Evidence that a candidate is better: how much more likely its pairs are with a gain than without one.

A pair is the baseline's value minus the candidate's, turned so that more is better, of two runs with one seed. The
spread of pairs is unknown, so the likelihood is that of the t statistics alone: the right Haar prior of the spread (D.
Hajnal, A two-sample sequential t-test, 1961; M. Perez-Ortiz et al., E-statistics, group invariance and anytime-valid
testing, 2022). Under no gain it is a martingale from 1 on, so it ever reaches 1/a with a chance of at most a, whenever
one looks. A candidate that is worse has less at every look: adding a constant to each pair raises every t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_SEEDS = 200  # more are not forecast
# Gauss-Legendre over the scale, up to where the integrand is below 1e-15 of its largest value: right to 1e-10.
NODES, WEIGHTS = np.polynomial.legendre.leggauss(96)
BEYOND = 9.0


def log_evidence(count: int, total: Floats, squares: Floats, effect: Floats) -> Floats:
    """Return the logarithm of the evidence of many series of pairs at once.

    Args:
        count: Pairs in each series, at least 1.
        total: Sum of the pairs, of shape (S,).
        squares: Sum of their squares, of shape (S,).
        effect: The gain that is looked for in standard deviations of a pair, above 0, of shape (S,).

    Returns:
        Natural logarithms of shape (S,): 0 says nothing, positive ones speak for a gain.
    """
    norm = np.sqrt(np.where(squares > 0.0, squares, 1.0))
    slope_S1 = (effect * np.where(squares > 0.0, total / norm, 0.0))[:, None]
    # The integral over u = norm / spread of u^(count - 1) exp(slope u - u^2 / 2), over that with slope 0.
    top_S1 = math.sqrt(count) + np.abs(slope_S1) + BEYOND
    scale_SU = top_S1 * (NODES + 1.0) / 2.0
    exponent_SU = (count - 1) * np.log(scale_SU) + slope_S1 * scale_SU - scale_SU**2 / 2.0
    largest_S1 = exponent_SU.max(1, keepdims=True)
    integral_S = (np.exp(exponent_SU - largest_S1) * WEIGHTS).sum(1) * top_S1[:, 0] / 2.0
    without = (count / 2.0 - 1.0) * math.log(2.0) + math.lgamma(count / 2.0)
    found: Floats = np.log(integral_S) + largest_S1[:, 0] - without - count * effect**2 / 2.0
    return found


def measure(gains: Sequence[float], effect: float) -> float:
    """Return the logarithm of the evidence of one series of pairs; 0.0 of none."""
    if not gains:
        return 0.0
    total, squares = math.fsum(gains), math.fsum(gain**2 for gain in gains)
    return float(log_evidence(len(gains), np.array([total]), np.array([squares]), np.array([effect]))[0])


def forecast(gains: Sequence[float], effect: float, needed: float) -> int | None:
    """Return how many pairs more would give the logarithm of evidence that is needed if mean and spread stay as they
    are; None with fewer than two pairs, without a gain, or beyond 200 in all."""
    if len(gains) < 2:
        return None
    mean = math.fsum(gains) / len(gains)
    around = math.fsum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1)
    for count in range(len(gains) + 1, MOST_SEEDS + 1):
        squares = np.array([count * mean**2 + (count - 1) * around])
        if log_evidence(count, np.array([count * mean]), squares, np.array([effect]))[0] >= needed:
            return count - len(gains)
    return None
