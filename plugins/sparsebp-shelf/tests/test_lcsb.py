"""`lcsb` moves a window over the layers, and each layer has its turn once a cycle."""

from __future__ import annotations

from collections import Counter

import pytest

from sparsebp_cli.policy import Step, make_policy
from sparsebp_shelf.block import LCSB, ResidualBlock


def active(num_layers: int, keep: float, index: int) -> set[int]:
    blocks = [
        ResidualBlock(f"layers.{layer}.{kind}", layer, kind, 16)
        for layer in range(num_layers)
        for kind in ("attention", "mlp")
    ]
    dropped = set(LCSB(keep=keep).drop(blocks, Step(index)))
    found = Counter(block.layer for block in blocks if block.name not in dropped)
    assert set(found.values()) <= {2}, "attention and MLP of a layer go together"
    return {layer for layer in found if layer is not None}


@pytest.mark.parametrize(
    ("num_layers", "keep", "windows"),
    [
        (6, 0.5, [{0, 1, 2}, {3, 4, 5}, {0, 1, 2}]),
        (4, 0.375, [{0}, {1, 2}, {3}, {0, 1}, {2}, {3, 0}]),
        (3, 2 / 3, [{0, 1}, {2, 0}, {1, 2}, {0, 1}]),
        (2, 0.25, [set(), {0}, set(), {1}]),
        (3, 1.0, [{0, 1, 2}]),
    ],
)
def test_the_window_moves_on_by_its_size_and_starts_again(num_layers, keep, windows) -> None:
    assert [active(num_layers, keep, index) for index in range(len(windows))] == windows


@pytest.mark.parametrize("keep", [0.1, 0.3, 0.7])
def test_every_layer_is_active_equally_often_over_whole_cycles(keep) -> None:
    turns = Counter(layer for index in range(100) for layer in active(10, keep, index))
    assert set(turns.values()) == {round(100 * keep)}


def test_the_control_of_a_cycle_drops_as_much_at_random() -> None:
    control = LCSB(keep=0.5).control
    assert control == {"name": "dropbp", "keep": 0.5}
    assert make_policy("dropbp", keep=0.5).budget == LCSB(keep=0.5).budget
    assert LCSB(keep=1.0).control is None
