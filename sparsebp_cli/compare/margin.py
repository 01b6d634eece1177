"""Test whether a group is not worse by more than a margin, and equal within it: yes, no or inconclusive.

The null hypothesis is that the true difference lies exactly on the margin. A two-sided t test, corrected like the
others for the number of groups, decides for the side of the mean. *Equal within the margin* tests both margins at once
(D. Schuirmann, A Comparison of the Two One-Sided Tests Procedure, 1987).

These answers hold for a number of seeds that was fixed beforehand. A second answer holds after any number of interim
looks: the t test's Bayes factor with a normal prior of the effect is an e-process (T. Lai, On Confidence Sequences,
1976; H. Wang and A. Ramdas, Anytime-valid t-tests and confidence sequences, 2023). Under the null hypothesis the chance
that it ever exceeds 20 is at most 5%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sparsebp_cli.compare.family import standard_error
from sparsebp_cli.compare.statistics import Difference, holm, two_sided_p
from sparsebp_cli.errors import UsageError

POWER = 0.8  # chance that so many seeds decide, if the true difference equals the observed one
MOST_SEEDS = 200
LEVEL = 0.05
PRIOR = 1.0  # standard deviation of the e-process's prior, in standard deviations of the pairs

Answer = Literal["yes", "no", "inconclusive"]


@dataclass(frozen=True)
class NotWorse:
    """Whether a group is not worse than the baseline by more than a margin.

    Args:
        margin: Largest deficit to the baseline that still counts as not worse, in the metric's unit, above 0.
        answer: ``yes``, ``no`` or ``inconclusive``.
        p: p of the test before correction; None if there is no test.
        p_holm: p of the test after correction over all groups; None if there is nothing to correct.
        more_seeds: About how many more shared seeds would decide, at the mean and spread so far; None if it is decided,
            cannot be predicted, or would take more than 200.
        equivalent: Whether the difference is smaller than the margin in both directions.
        anytime: The answer that holds for any number of interim looks while seeds were added.
        withheld: Why the answer differs from the numbers; empty if it does not.
    """

    margin: float
    answer: Answer
    p: float | None = None
    p_holm: float | None = None
    more_seeds: int | None = None
    equivalent: Answer = "inconclusive"
    anytime: Answer = "inconclusive"
    withheld: str = ""


def parse_margin(text: str) -> tuple[str | None, float]:
    """Parse ``eval/loss=0.01`` or ``0.01`` into the metric (None if not named) and the margin. Raise ``UsageError`` for
    another form or a margin not above 0."""
    name, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0.0) or ("=" in text and not name.strip()):
        raise UsageError(f"--margin must be a number above 0 or METRIC=NUMBER, such as eval/loss=0.01; got {text!r}")
    return name.strip() or None, value


def decide_all(differences: Sequence[Difference | None], margin: float, *, worse_is_up: bool) -> list[NotWorse | None]:
    """Answer for every group at once, because the correction needs all of them. ``differences`` are of each group to
    the baseline, None if missing. ``margin`` is above 0. ``worse_is_up`` says whether a larger value is worse.
    The chance of any wrong answer is at most 5%."""
    worsenings = [None if d is None else _worsening(d, worse_is_up) for d in differences]
    raw = [
        None if w is None or d is None else _test(w, d, margin) for w, d in zip(worsenings, differences, strict=True)
    ]
    corrected = holm(raw) if sum(p is not None for p in raw) > 1 else [None] * len(raw)
    decisive = [p if p_holm is None else p_holm for p, p_holm in zip(raw, corrected, strict=True)]
    equal = holm([_test_both(w, d, margin) for w, d in zip(worsenings, differences, strict=True)])
    anytime = holm([_test_anytime(w, d, margin) for w, d in zip(worsenings, differences, strict=True)])
    found: list[NotWorse | None] = []
    for i, (difference, worsening) in enumerate(zip(differences, worsenings, strict=True)):
        if difference is None or worsening is None:
            found.append(None)
            continue
        if difference.low == difference.high == 0.0:
            found.append(NotWorse(margin, "yes", equivalent="yes", anytime="yes"))
            continue
        p = raw[i]
        decision = NotWorse(
            margin,
            _answer(decisive[i], holds=worsening < margin),
            p,
            corrected[i],
            equivalent=_answer(equal[i], holds=abs(worsening) < margin),
            anytime=_answer(anytime[i], holds=worsening < margin),
        )
        if decision.answer == "inconclusive" and p is not None and difference.sd and not difference.choice_error:
            tests = sum(x is not None for x in raw)
            needed = seeds_needed(abs(worsening - margin) / difference.sd, difference.n, LEVEL / tests)
            decision = replace(decision, more_seeds=None if needed is None else needed - difference.n)
        found.append(decision)
    return found


def withhold(decision: NotWorse | None, margin: float, diverged: int, lost: int) -> NotWorse | None:
    """Replace an answer that only survivors support: ``no`` with a diverged run, never ``yes`` with a lost one.
    ``diverged`` counts runs on seeds on which the baseline did not diverge; they are worse than any margin. ``lost``
    counts runs that did not finish and were not repeated, or that diverged like the baseline."""
    if diverged > 0:
        reason = f"{diverged} run{'s' * (diverged > 1)} diverged, which counts as worse than any margin"
        return NotWorse(margin, "no", equivalent="no", anytime="no", withheld=reason)
    if decision is None or lost <= 0 or "yes" not in {decision.answer, decision.equivalent, decision.anytime}:
        return decision
    return replace(
        decision,
        answer=_not_yes(decision.answer),
        equivalent=_not_yes(decision.equivalent),
        anytime=_not_yes(decision.anytime),
        more_seeds=None,
        withheld=f"{lost} run{'s' * (lost > 1)} gave no result",
    )


def seeds_needed(effect: float, already: int, level: float = LEVEL) -> int | None:
    """Return how many pairs in total decide with a chance of 80%, by the noncentral t distribution; None above 200.
    ``effect`` is the distance of the mean from the margin in standard deviations of the pairs, at least 0. The result
    exceeds ``already``. ``level``, in (0, 1), is that of the two-sided test."""
    from scipy import stats

    def decides(n: int) -> bool:
        return bool(stats.nct.sf(stats.t.ppf(1 - level / 2, n - 1), n - 1, effect * math.sqrt(n)) >= POWER)

    low, high = already, MOST_SEEDS
    if effect == 0.0 or high <= low or not decides(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle, high)
    return high


def _worsening(difference: Difference, worse_is_up: bool) -> float:
    return difference.mean if worse_is_up else -difference.mean


def _not_yes(answer: Answer) -> Answer:
    return "inconclusive" if answer == "yes" else answer


def _answer(p: float | None, *, holds: bool) -> Answer:
    if p is None or not p < LEVEL:
        return "inconclusive"
    return "yes" if holds else "no"


def _test(worsening: float, difference: Difference, margin: float) -> float | None:
    """Return the two-sided p of the null hypothesis that the true difference is the margin."""
    if (found := standard_error(difference)) is None:
        return None
    return two_sided_p((worsening - margin) / found[0], found[1])


def _test_both(worsening: float | None, difference: Difference | None, margin: float) -> float | None:
    """Return the larger p of both tests if the mean is inside both margins; outside, the p of the exceeded margin."""
    if worsening is None or difference is None:
        return None
    nearer = margin if worsening >= 0.0 else -margin
    return _test(worsening, difference, nearer)


def _test_anytime(worsening: float | None, difference: Difference | None, margin: float) -> float | None:
    """Return 1 / e-value: the Bayes factor of the t statistic against the margin, right Haar prior of the spread."""
    if worsening is None or difference is None or difference.p is None or not difference.sd or difference.choice_error:
        return None  # looks at further seeds do not reduce the error of tuning
    n, wide = difference.n, 1 + difference.n * PRIOR**2
    square = n * ((worsening - margin) / difference.sd) ** 2 / (n - 1)
    log_e = 0.5 * n * (math.log1p(square) - math.log1p(square / wide)) - 0.5 * math.log(wide)
    return math.exp(-max(log_e, 0.0))
