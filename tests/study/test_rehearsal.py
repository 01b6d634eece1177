"""Rehearsals are as long as a price needs, and no longer than the run that it is for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from sparsebp_lab.study.budget import find_steps, make_rehearsals
from sparsebp_lab.study.loader import load_study
from sparsebp_lab.study.store import TrialStore
from sparsebp_lab.study.trial import StudyTrial, TrialMaker

from .conftest import Write

DENSE_FLOPS = 1000.0


class PricedStore:
    """Has a run of each trial, or of ``dense`` alone. ``topk`` costs half of dense on average, with a spread."""

    def __init__(self, spread: float, *, only_dense: bool = False) -> None:
        self.spread, self.only_dense = spread, only_dense

    def load(self, trial: StudyTrial) -> SimpleNamespace | None:
        if self.only_dense and trial.arm != "dense":
            return None
        draws = np.random.default_rng(trial.steps).standard_normal(trial.steps)
        shares = np.ones(trial.steps) if trial.arm == "dense" else 0.5 * (1.0 + self.spread * draws)
        values = {
            "flops/step": [*(DENSE_FLOPS * shares)],
            "flops/step_dense": [DENSE_FLOPS] * trial.steps,
            "flops/update_dense": [0.0] * trial.steps,
        }
        history = SimpleNamespace(facts={"dense_step_flops": DENSE_FLOPS})
        return SimpleNamespace(run_id=trial.run_id, finished=True, values=values.__getitem__, history=history)


def rehearsed(write_study: Write, steps: int, store: PricedStore) -> dict[str, list[int]]:
    loaded = load_study(write_study(more=f"budget: {{same: cost, as: dense, steps: {steps}}}\n"))
    found = make_rehearsals(loaded, TrialMaker("tiny", loaded.folders), cast("TrialStore", store))
    return {loaded.variants[at].arm: [trial.steps for trial in some] for at, some in found.items()}


@pytest.mark.parametrize(
    ("steps", "lengths"),
    [
        (10, [10, 20]),  # it has 20 steps itself
        (12, [10, 20]),
        (60, [10, 20, 40, 80]),
        (1000, [10, 20, 40, 80, 160, 320]),
    ],
)
def test_no_rehearsal_is_longer_than_the_run_that_it_prices(write_study: Write, steps: int, lengths: list[int]) -> None:
    """The price varies by a fifth from batch to batch, so that 320 steps do not tell it within 2 %."""
    assert rehearsed(write_study, steps, PricedStore(0.2)) == {"dense": [10], "topk": lengths}


def test_a_price_that_is_known_is_not_rehearsed_again(write_study: Write) -> None:
    assert rehearsed(write_study, 1000, PricedStore(0.0)) == {"dense": [10], "topk": [10]}
    assert rehearsed(write_study, 1000, PricedStore(0.05)) == {"dense": [10], "topk": [10, 20]}


def test_no_arm_is_rehearsed_longer_before_the_budget_is_known(write_study: Write) -> None:
    loaded = load_study(write_study(more="budget: {same: cost, as: topk, steps: 20}\n"))
    maker, store = TrialMaker("tiny", loaded.folders), cast("TrialStore", PricedStore(0.2, only_dense=True))
    found = make_rehearsals(loaded, maker, store)
    assert {len(some) for some in found.values()} == {1}
    assert find_steps(loaded, found, store) == {}
