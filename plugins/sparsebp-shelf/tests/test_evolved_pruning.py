"""Evolved pruning: the weights after several visits, which examples an epoch visits by them, and the contract."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sparsebp_cli.policy import Epoch, Observation, Step, make_policy
from sparsebp_cli.testing import check_policy
from sparsebp_shelf.policies.evolved_pruning import EvolvedPruning

NAN = math.nan


def epoch_of(losses: Sequence[float]) -> Epoch:
    return Epoch(1, torch.tensor(losses), len(losses), 100 * len(losses))


def weights(policy: EvolvedPruning, losses: Sequence[float], table: Sequence[float], draw: int = 0) -> list[float]:
    """Return the weight of every example, 0 for those that are left out, with the weights of a table as the state."""
    state = {"average_N": torch.zeros(len(table)), "weight_N": torch.tensor(table)}
    visits = policy.choose(epoch_of(losses), Step(3, seed=5, draw=draw, state=state))
    if visits is None:
        return [1.0] * len(losses)
    found = dict(zip(visits.index_K.tolist(), visits.weight_K.tolist(), strict=True))
    return [found.get(row, 0.0) for row in range(len(losses))]


def test_three_visits_give_the_weights_of_the_recursion() -> None:
    """s = 1/4, 0.425, 0.4825; w = 0.2 s + 0.8 l with the s before: 1.65, 0.885, 3.2965."""
    policy = EvolvedPruning()
    state = policy.init(range(4))
    for loss, weight in ((2.0, 1.65), (1.0, 0.885), (4.0, 3.2965)):
        seen = Observation(loss={"0": torch.tensor([loss])}, row={"0": torch.tensor([2])})
        state = policy.observe(state, seen, Step(0))
        assert torch.as_tensor(state["weight_N"]).tolist() == pytest.approx([0.0, 0.0, weight, 0.0])
    assert torch.as_tensor(state["average_N"]).tolist() == pytest.approx([0.25, 0.25, 0.83425, 0.25])


def test_an_epoch_visits_half_in_proportion_to_the_weights() -> None:
    """Two of four by the weights 1, 2, 3, 4: probabilities 0.2, 0.4, 0.6, 0.8, and 1 / these as weights."""
    chance, policy = [0.2, 0.4, 0.6, 0.8], EvolvedPruning(keep=0.5, weighted=True)
    counts = [0] * 4
    for draw in range(2000):
        found = weights(policy, [1.0] * 4, [1.0, 2.0, 3.0, 4.0], draw)
        assert found.count(0.0) == 2
        for row, weight in enumerate(found):
            assert weight == 0.0 or weight == pytest.approx(1 / chance[row], rel=1e-5)
            counts[row] += weight > 0.0
    for row, expected in enumerate(chance):
        assert abs(counts[row] / 2000 - expected) <= 6 * (expected * (1 - expected) / 2000) ** 0.5, row


def test_without_weights_every_visited_example_counts_once() -> None:
    found = weights(EvolvedPruning(keep=0.5), [1.0] * 4, [1.0, 2.0, 3.0, 4.0])
    assert sorted(found) == [0.0, 0.0, 1.0, 1.0]


def test_an_example_that_was_never_trained_on_is_always_visited() -> None:
    losses = [0.1, NAN, 0.2, 0.3, NAN, 5.0]
    for draw in range(100):
        found = weights(EvolvedPruning(keep=0.5), losses, [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], draw)
        assert (found[1], found[4], found.count(0.0)) == (1.0, 1.0, 3)
    many = weights(EvolvedPruning(keep=0.2), [NAN, NAN, 0.1, 0.2], [0.0, 0.0, 1.0, 1.0])
    assert sorted(many[2:]) == [0.0, 1.0], "more were never seen than are kept: one of the others is visited"
    assert weights(EvolvedPruning(keep=0.5), [NAN] * 4, [0.0] * 4) == [1.0] * 4


def test_keeping_everything_is_dense_and_the_control_draws_evenly() -> None:
    assert EvolvedPruning(keep=1.0).exact
    assert EvolvedPruning(keep=1.0).control is None
    entry: dict[str, Any] = dict(EvolvedPruning(keep=0.5).control or {})
    control = make_policy(entry.pop("name"), **entry)
    assert isinstance(control, EvolvedPruning)
    assert control.control is None
    counts = [0] * 4
    for draw in range(2000):
        for row, weight in enumerate(weights(control, [1.0] * 4, [0.0, 1.0, 10.0, 1000.0], draw)):
            counts[row] += weight > 0.0
    assert all(abs(count / 2000 - 0.5) <= 6 * (0.25 / 2000) ** 0.5 for count in counts), counts


@pytest.mark.parametrize("options", [{}, {"keep": 0.1, "weighted": True}, {"keep": 1.0}, {"by": "random"}], ids=str)
def test_every_form_keeps_the_contract(options: dict[str, Any]) -> None:
    check_policy("evolved-pruning", **options)
