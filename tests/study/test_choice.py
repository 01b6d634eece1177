"""Grids grow at their edges, ties go by neighbours, and the error of a choice is that of choosing again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparsebp_cli.compare.family import correct_family
from sparsebp_cli.compare.statistics import add_choice, paired_difference, withhold_statement
from sparsebp_cli.errors import RecipeError
from sparsebp_lab.study import selection
from sparsebp_lab.study.choice import find_choice_errors
from sparsebp_lab.study.course import Tuned, choose_best
from sparsebp_lab.study.extension import extend, find_grid
from sparsebp_lab.study.loader import LoadedStudy, load_study
from sparsebp_lab.study.selection import find_tuned_by

from .conftest import STUDY, Cli, Write
from .study_folder import list_trials

GROWS = "search: {extend: 2}\n"


def tune(loaded: LoadedStudy, best: float) -> list[Tuned]:
    """Every arm is the better the nearer its learning rate is to one, by factors."""
    rates = [dict(variant.combination)["training.learning_rate"] for variant in loaded.variants]
    assert all(isinstance(rate, float) for rate in rates)
    far = [abs(np.log(float(str(rate)) / best)) for rate in rates]
    return [Tuned(variant, float(value)) for variant, value in zip(loaded.variants, far, strict=True)]


def test_a_grid_is_extended_until_the_best_is_inside(write_study: Write) -> None:
    loaded = load_study(write_study(STUDY + GROWS))
    sizes, stays = [], []
    for _ in range(4):
        loaded, stays = extend(loaded, tune(loaded, 2e-3))
        sizes.append(len(loaded.variants))
    assert [*find_grid(loaded).values()] == [[5e-4, 1e-3, 2e-3, 4e-3]]
    assert (sizes, stays) == ([6, 8, 8, 8], [])


def test_a_grid_says_at_which_edge_it_stops(write_study: Write) -> None:
    loaded = load_study(write_study(STUDY + GROWS))
    for _ in range(4):
        loaded, stays = extend(loaded, tune(loaded, 1.0))
    assert [*find_grid(loaded).values()] == [[5e-4, 1e-3, 2e-3, 4e-3]]
    assert stays == ["dense, topk: the best training.learning_rate=0.004 is the largest of its grid (extended 2x)"]


def test_every_arm_gets_the_values_that_one_arm_needs(write_study: Write) -> None:
    loaded = load_study(write_study(STUDY.replace("[5e-4, 1e-3]", "[1e-3, 2e-3, 4e-3]") + GROWS))
    tuned = tune(loaded, 2e-3)[:3] + tune(loaded, 4e-3)[3:]
    grown, _ = extend(loaded, tuned)
    assert {arm: len(grown.of_arm(arm)) for arm in ("dense", "topk")} == {"dense": 4, "topk": 4}
    assert extend(loaded, [replace(tuned[0], value=None), *tuned[1:]]) == (loaded, [])  # a result is missing


def test_whole_numbers_stay_whole_and_words_are_left_alone(write_study: Write) -> None:
    text = STUDY.replace("training.learning_rate: [5e-4, 1e-3]", "training.per_device_train_batch_size: [4, 2]")
    loaded = load_study(write_study(text + GROWS))
    for _ in range(4):
        loaded, stays = extend(loaded, [Tuned(v, float(str(v.combination[0][1]))) for v in loaded.variants])
    assert [*find_grid(loaded).values()] == [[4, 2, 1]]
    assert stays == [
        "dense, topk: the best training.per_device_train_batch_size=1 is the least of its grid (extended 1x)"
    ]
    words = STUDY.replace("training.learning_rate: [5e-4, 1e-3]", "training.lr_scheduler_type: [linear, cosine]")
    loaded = load_study(write_study(words + GROWS))
    assert extend(loaded, [Tuned(variant, 1.0) for variant in loaded.variants]) == (loaded, [])


def test_of_equal_values_that_with_the_better_neighbours_is_chosen(write_study: Write) -> None:
    loaded = load_study(write_study(STUDY.replace("[5e-4, 1e-3]", "[1e-4, 2e-4, 4e-4, 8e-4]")))
    values = (1.0, 3.0, 1.0, 2.0)
    tuned = [Tuned(variant, value) for variant, value in zip(loaded.variants[:4], values, strict=True)]
    assert choose_best(tuned)["dense"].label == "learning_rate=0.0004"


def test_an_arm_of_the_same_gradient_takes_the_values_of_another(write_study: Write) -> None:
    loaded = load_study(write_study(more="shares: {topk: dense}\n"))
    assert loaded.study.shares == {"topk": "dense"}
    for wrong in ("{topk: topk}", "{topk: dens}", "{topq: dense}"):
        with pytest.raises(RecipeError, match=r"shares"):
            load_study(write_study(more=f"shares: {wrong}\n"))


def test_an_arm_without_tuning_has_the_values_of_those_with_the_same() -> None:
    reported = {("dense", "a"), ("fused", "a"), ("topk", "a"), ("lora", "b"), ("plain", ""), ("other", "c")}
    assert find_tuned_by(reported, {"dense", "topk", "lora"}) == {
        "dense": ("dense",),
        "fused": ("dense", "topk"),
        "topk": ("topk",),
        "lora": ("lora",),
        "plain": ("plain",),
        "other": ("other",),
    }


def test_a_clear_choice_has_no_error_and_a_close_one_that_of_choosing_again() -> None:
    draw = np.random.default_rng(0)
    noise = draw.standard_normal((2, 3))
    clear = {"dense": np.array([[0.0], [50.0]]) + noise, "topk": np.array([[0.0], [50.0]]) + noise[:, ::-1]}
    assert max(find_choice_errors(clear, clear).values()) == 0.0
    close = {arm: by - by.mean(1, keepdims=True) + np.array([[0.0], [0.5]]) for arm, by in clear.items()}
    errors = find_choice_errors(close, close)
    assert 0.0 < errors["dense"] < 0.5  # at most the whole gap, and not each time
    assert find_choice_errors({"dense": noise[:1]}, {"dense": noise[:1]}) == {"dense": 0.0}  # nothing to choose
    assert find_choice_errors({"dense": noise[:, :1]}, {"dense": noise[:, :1]}) == {"dense": float("inf")}


def test_the_noise_of_one_corner_of_a_grid_is_no_noise_of_another() -> None:
    """Two good combinations are quiet; a third, which nobody would choose, is forty times as noisy."""
    draw = np.random.default_rng(1)
    truth, spread = np.array([[0.0], [0.5], [30.0]]), np.array([[0.05], [0.05], [2.0]])
    arms = {str(arm): truth + spread * draw.standard_normal((3, 3)) for arm in range(8)}
    assert max(find_choice_errors(arms, arms).values()) < 0.05
    rows = {arm: by[::-1] for arm, by in arms.items()} | {"0": arms["0"]}
    named = {arm: ["c", "b", "a"] for arm in arms} | {"0": ["a", "b", "c"]}
    assert max(find_choice_errors(rows, rows, named).values()) < 0.05


def test_the_error_of_a_choice_widens_what_is_stated() -> None:
    ours, theirs = {0: 1.0, 1: 1.1, 2: 1.3}, {0: 0.0, 1: 0.1, 2: 0.05}
    plain = paired_difference(ours, theirs)
    assert plain is not None
    wide = add_choice(plain, 5.0)
    assert wide.p is not None
    assert plain.p is not None
    assert wide.p > 0.5 > plain.p
    assert wide.mean == plain.mean
    (family,) = correct_family([[wide, plain, plain]], ratios=[False])
    assert family[0] is not None
    assert family[1] is not None
    assert (family[0].p_holm or 0.0) > 0.5 > (family[1].p_holm or 1.0)
    nothing = withhold_statement(plain)
    assert (nothing.mean, nothing.p, nothing.low) == (plain.mean, None, None)


@pytest.mark.slow
def test_an_added_value_that_the_budget_does_not_pay_for_is_not_tried(cli: Cli, write_study: Write) -> None:
    vary = "vary:\n  training.per_device_train_batch_size: [16, 8]\n"
    text = STUDY.replace("vary:\n  training.learning_rate: [5e-4, 1e-3]\n", vary)
    budget = "budget: {same: cost, as: dense, steps: 10}\n"  # 10 steps of 16, which are 19 of 8 and 5 of 32
    done = cli("study", write_study(text + budget + "search: {extend: 1}\n"))
    assert done.returncode == 0, done.stdout + done.stderr
    recipes = [run.read_plan()["recipe"] for run in list_trials("tune")]
    tried = {(recipe["name"], recipe["training"]["per_device_train_batch_size"]) for recipe in recipes}
    assert {batch for name, batch in tried if name == "topk"} >= {8, 16, 32}
    assert {batch for name, batch in tried if name == "dense"} == {8, 16}


class Fake:
    """A finished tuning run with one evaluation."""

    finished, flat = True, dict[str, object]()

    def __init__(self, value: float) -> None:
        self.value = value

    def evaluations(self, _: str) -> list[float]:
        return [self.value]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_combination_that_diverged_leaves_the_error_of_the_choice_finite(value: float) -> None:
    losses = {("dense", "1"): (3.0, 3.1), ("dense", "2"): (3.2, 3.05), ("topk", "1"): (value, 3.0)}
    losses |= {("topk", "2"): (3.1, 3.0), ("topk", "3"): (3.0, 3.2)}
    trials: Any = {key: [(key, seed) for seed in range(2)] for key in losses}
    runs: Any = SimpleNamespace(load=lambda trial: Fake(losses[trial[0]][trial[1]]))
    found = selection._find_choice(trials, runs)
    assert found
    assert all(np.isfinite(error) for errors in found.values() for error in errors.values())
    without = {key: some for key, some in trials.items() if key != ("topk", "1")}
    assert found == selection._find_choice(without, runs)
