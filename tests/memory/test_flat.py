"""No step leaves anything behind in memory: no policy, and no door through which a policy trains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.guess import of_every_policy, sites_of

from .flat import ROUND, count_while_training

# Options and arguments of ``attach`` where a policy's own defaults would do nothing here, or another thing each step.
NAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compact": ({"keep": 0.5}, {}),
    "frozen": ({"turn": "layers", "every": 2}, {}),
    "grades": ({"threshold": 1e9, "grace": 0.0}, {}),
    "importance": ({"keep": 0.5, "threshold": 0.0}, {}),
    "rho": ({"keep": 0.5}, {"reference": "batch"}),
    "selective-backprop": ({"keep": 0.5, "start": 0.0, "end": 1.0, "interrupt": 0}, {}),
    "sketch": ({"keep": 0.5}, {}),
    "subnet": ({"keep": 0.3}, {}),
    "tokens": ({"score": "random", "keep": 0.5, "mode": "detach"}, {}),
    "topk": ({"keep": 0.5, "along": "rows"}, {}),
    "uniform": ({"keep": 0.5, "start": 0.0, "end": 1.0, "interrupt": 0}, {}),
    "vcas": ({"every": 4}, {}),
    "velora": ({"group": 4}, {}),
    "wta-crs": ({"keep": 0.3}, {}),
}
CASES = of_every_policy(NAMED, lambda _, options, found: (options, {"sites": sites_of(found)}))


@pytest.mark.promise("R34")
# One of each way to keep something between steps; the others are of the same kinds.
@pytest.mark.always(
    "lossless", "topk", "rho", "importance", "grades", "max-child", "compact", "crs", "subnet", "tokens"
)
@pytest.mark.parametrize("name", CASES)
def test_no_policy_gathers_anything_over_steps_of_changing_shapes(name: str) -> None:
    options, attached = CASES[name]
    middle, last = count_while_training({"name": name, **options}, attached, (3 * ROUND, 5 * ROUND))
    assert grown(middle, last) == {}


@pytest.mark.long
@pytest.mark.promise("R34")
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_gathered_over_500_steps(name: str) -> None:
    options, attached = CASES[name]
    middle, last = count_while_training({"name": name, **options}, attached, (10 * ROUND, 125 * ROUND))
    assert grown(middle, last) == {}


def grown(middle: dict[str, int], last: dict[str, int]) -> dict[str, int]:
    """Return by how much what lives has grown."""
    return {name: last[name] - middle[name] for name in last if last[name] > middle[name]}
