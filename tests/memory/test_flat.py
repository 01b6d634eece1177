"""No step leaves anything behind in memory: no policy, and no door through which a policy trains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plugin import find_ours

from .flat import ROUND, count_while_training

SITES = ["*q_proj", "*up_proj"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compact": ({"keep": 0.5}, {}),
    "crs": ({"keep": 0.5}, {}),
    "dense": ({}, {}),
    "dither": ({}, {}),
    "dropbp": ({"keep": 0.5}, {}),
    "frozen": ({"turn": "layers", "every": 2}, {}),
    "gact": ({"bits": 4}, {}),
    "grades": ({"threshold": 1e9, "grace": 0.0}, {}),
    "importance": ({"keep": 0.5, "threshold": 0.0}, {}),
    "layerdrop": ({}, {}),
    "lossless": ({}, {}),
    "max-child": ({}, {"sites": "nodes"}),
    "mvue": ({}, {}),
    "random": ({"keep": 0.5}, {}),
    "random-child": ({}, {"sites": "nodes"}),
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


def test_every_policy_of_the_package_that_attaches_is_tried() -> None:
    assert set(CASES) == set(find_ours())


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
