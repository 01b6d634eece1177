"""What a verdict says in simulated studies whose truth is known, and that it never says more than its numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparsebp_cli.compare.measured import Cost, Quality, Speed
from sparsebp_cli.compare.question import Question, choose_way
from sparsebp_cli.compare.statistics import Difference, Quartiles, holm
from sparsebp_cli.compare.verdict import Doubts, give_verdict
from sparsebp_cli.compare.words import say_all
from sparsebp_cli.run.metric import find_known
from tests.compare.t_test import t_interval

STUDIES = 4000
STEP = Quartiles(0.2, 0.19, 0.21, 60)


def studies(effects: tuple[float, ...], num_seeds: int = 5, noise: float = 0.1) -> list[list[Difference]]:
    """Differences as ``compare_runs`` would make them: one list of policies a study, corrected for their number."""
    draw = np.random.default_rng(len(effects) + num_seeds)
    values = draw.normal(0.0, noise, (STUDIES, len(effects), num_seeds)) + np.array(effects)[:, None]
    low, high, p = t_interval(values)
    mean, sd = values.mean(axis=-1), values.std(axis=-1, ddof=1)
    found = []
    for s in range(STUDIES):
        corrected = holm([float(x) for x in p[s]])
        found.append(
            [
                Difference(*(float(x[s, i]) for x in (mean, low, high)), num_seeds, float(sd[s, i]), float(p[s, i]), c)
                for i, c in enumerate(corrected)
            ]
        )
    return found


def verdict(difference: Difference | None, ratio: Difference | None = None) -> str:
    speed = Speed(step=STEP, step_ratio=ratio)
    quality = Quality(difference=difference)
    return say_all(give_verdict(quality, speed, Speed(step=STEP), Cost(), "eval/loss", "lower", [], Doubts()))


def test_where_nothing_differs_5_of_100_studies_at_most_find_a_difference() -> None:
    said = [[verdict(difference) for difference in study] for study in studies((0.0, 0.0, 0.0))]
    claims = sum(any("is worse" in text or "is better" in text for text in study) for study in said)
    assert claims / STUDIES < 0.05 + 0.01
    assert all(
        "which is not proof of equality" in text
        for study in said
        for text in study
        if "is worse" not in text and "is better" not in text
    )


def test_what_is_there_is_found_and_its_direction_is_right() -> None:
    said = [verdict(study[0]) for study in studies((0.3,))]
    assert sum("eval/loss is worse by" in text for text in said) / STUDIES > 0.95
    assert not any("better" in text for text in said)
    said = [verdict(study[0]) for study in studies((-0.3,))]
    assert sum("eval/loss is better by" in text for text in said) / STUDIES > 0.95
    assert not any("worse" in text for text in said)


def test_equal_step_times_are_called_different_in_5_of_100_studies_at_most() -> None:
    claims = 0
    for study in studies((0.0, 0.0)):
        ratios = [
            Difference(*(math.exp(x or 0.0) for x in (d.mean, d.low, d.high)), d.n, d.sd, d.p, d.p_holm) for d in study
        ]
        claims += any("no difference in step time was shown" not in verdict(None, ratio) for ratio in ratios)
    assert claims / STUDIES < 0.05 + 0.01


numbers = st.floats(-10, 10)


@example(0.0, 0.0, 0.0, 3, 0.0, None)
@given(numbers, numbers, numbers, st.integers(0, 9), st.none() | st.floats(0, 1), st.none() | st.floats(0, 1))
def test_a_difference_is_claimed_only_where_its_corrected_p_value_allows_it(
    mean: float, low: float, width: float, n: int, p: float | None, p_holm: float | None
) -> None:
    interval = (low, low + abs(width)) if n >= 3 else (None, None)
    p = p if n >= 3 else None
    difference = Difference(mean, *interval, n, 0.1, p, p_holm if p is not None else None)
    text = verdict(difference)
    claimed = "is worse" in text or "is better" in text
    decisive = difference.decisive_p
    is_zero = mean == 0.0 or interval == (0.0, 0.0)
    assert claimed == (n >= 3 and decisive is not None and decisive < 0.05 and not is_zero)
    if n < 3:
        assert "no statement about quality" in text


@pytest.mark.parametrize(
    ("metric", "way"),
    [
        ("eval/loss", "lower"),
        ("eval/accuracy", "higher"),
        ("test/f1", "higher"),
        ("train/grad_norm", ""),
        ("eval/some_loss", ""),
    ],
)
def test_which_way_is_better_is_known_or_not_claimed(metric: str, way: str) -> None:
    assert choose_way(Question(), metric, find_known(metric)) == way
