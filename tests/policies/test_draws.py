"""The suites judge promises about draws by so many draws that an honest policy is refused once in a million."""

from __future__ import annotations

import random

import pytest

from sparsebp_cli.testing.promise import RARE, enough
from sparsebp_cli.testing.suite import find_share


@pytest.mark.parametrize("share", [0.9, 0.5, 0.05, 0.001])
def test_so_many_draws_miss_a_share_of_them_once_in_a_million(share: float) -> None:
    assert (1 - share) ** enough(share) <= RARE < (1 - share) ** (enough(share) - 2)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.02])
def test_the_share_of_unlike_draws_is_hardly_ever_overrated(share: float) -> None:
    worst = 1.0  # of the chances that all draws which are then waited for are alike
    for seed in range(300):
        rng = random.Random(seed)
        found = find_share(rng.random() < share for _ in range(5000))
        if found is not None:
            worst = min(worst, share / found)
    assert worst > 0.5


def test_a_policy_that_never_draws_otherwise_is_not_random() -> None:
    assert find_share(False for _ in range(5000)) is None
