"""No policy of the shelf leaves anything behind in memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.memory.flat import ROUND, count_while_training
from tests.memory.test_flat import grown

POLICIES: list[dict[str, Any]] = [{"name": "partial-forward", "after": 1, "keep": 0.5}]


@pytest.mark.promise("R34")
@pytest.mark.parametrize("at", [(12, 20), pytest.param((40, 500), marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy["name"]))
def test_no_policy_of_the_shelf_gathers_anything(policy: dict[str, Any], at: tuple[int, int]) -> None:
    assert at[0] % ROUND == at[1] % ROUND == 0
    middle, last = count_while_training(policy, {}, at)
    assert grown(middle, last) == {}
