"""The exchange rate's page says what its archives hold, by rules that are tried here on surfaces that are known."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RATE = 1e-3
FAIR = {"unbiased": True}
LATER = {"H7": None, "H8": None}  # without a share of the rate


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("exchange_result")
    sys.modules.pop("exchange_result", None)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("exchange_page")
    sys.modules.pop("exchange_page", None)


def make_run(batch: float, seed: int) -> dict[int, float]:
    """A training that obeys the law: its loss goes with the logarithm of its batch and with its steps."""
    return {step: 4.0 - 0.2 * math.log2(batch) - 0.01 * step + 0.001 * (seed % 3) for step in range(20, 121, 20)}


def make_losses(arms: dict[str, float]) -> dict[str, dict[int, dict[int, float]]]:
    dense = {f"dense-b{batch}-r0.001": {s: make_run(batch, s) for s in (0, 1, 2)} for batch in (1, 2, 4, 8, 16, 32)}
    return dense | {arm: {seed: make_run(batch, seed) for seed in (100, 101, 102)} for arm, batch in arms.items()}


def make_worth(noise: float, price: float = 1.0, bias: float = 0.0, curved: float = 0.0) -> dict[str, Any]:
    product = (1 + noise) * price
    numbers = {"price": price, "noise": noise, "noise_curved": curved, "bias": bias, "product": product}
    return interval_of(**numbers)


def interval_of(**numbers: float) -> dict[str, Any]:
    return {name: {"value": value, "low": value - 0.01, "high": value + 0.01} for name, value in numbers.items()}


def test_methods_that_obey_the_law_are_found_to(result: ModuleType) -> None:
    noise = {"a": 0.0, "b": 1.0, "c": 2.5, "d": 7.0}
    losses = make_losses({arm: 16 / (1 + nu) for arm, nu in noise.items()})
    worth = {arm: make_worth(nu) for arm, nu in noise.items()}
    found = result.judge(losses, worth, {arm: {"unbiased": True} for arm in noise}, RATE)
    assert found["scores"]["r2"] == pytest.approx(1.0, abs=1e-4)
    assert found["scores"]["spearman"] == pytest.approx(1.0)
    assert found["scores"]["within"] == 4
    assert found["hypotheses"] == {"H1": True, "H2": None, "H3": True, "H4": True, "H5": False, "H6": True} | LATER | {
        "H9": True,
        "H10": None,
    }
    assert [row["batch"] for row in found["rows"]] == [16.0, 8.0, 16 / 3.5, 2.0]


def test_methods_whose_noise_costs_by_curvature_alone_refuse_h1_and_hold_h5(result: ModuleType) -> None:
    """Most of their noise lies where the loss is flat, so they train like a larger batch than it says."""
    noise = {"a": (0.0, 0.0), "b": (3.0, 1.0), "c": (7.0, 2.5), "d": (60.0, 7.0), "e": (1.0, 0.2)}
    losses = make_losses({arm: 16 / (1 + curved) for arm, (_, curved) in noise.items()})
    worth = {arm: make_worth(nu, curved=curved) for arm, (nu, curved) in noise.items()}
    found = result.judge(losses, worth, dict.fromkeys(noise, FAIR), RATE)
    scores = found["scores"]
    assert scores["r2_curved"] == pytest.approx(1.0, abs=1e-4)
    assert (scores["curved"], scores["both"], scores["bracketed"]) == (5, 4, 4)
    assert scores["ratio_curved"] < 0.01
    assert (found["hypotheses"]["H1"], found["hypotheses"]["H5"], found["hypotheses"]["H6"]) == (False, True, True)
    assert found["unpredicted"] == ["d"]


def test_methods_whose_steps_are_shorter_refuse_h5_and_hold_h7_and_h8(result: ModuleType) -> None:
    """Half of the rate costs 0.1, half of the batch 0.2."""
    shares = {"a": (0.0, 1.0), "b": (0.05, 0.5), "c": (1.0, 0.7), "d": (3.0, 0.6), "e": (0.01, 0.4)}

    def run(batch: float, share: float, seed: int) -> dict[int, float]:
        return {step: loss - 0.1 * math.log2(share) for step, loss in make_run(batch, seed).items()}

    losses = {
        f"dense-b{batch}-r{rate:g}": {seed: run(batch, rate / RATE, seed) for seed in (0, 1, 2)}
        for batch in (1, 2, 4, 8, 16, 32)
        for rate in (0.2 * RATE, 0.5 * RATE, RATE)
    }
    trained = {"dense": (16.0, 1.0), "b-at-its-rate": (16 / 1.05, 1.0), "e-at-its-rate": (16 / 1.01, 0.9)}
    trained |= {arm: (16 / (1 + nu), share) for arm, (nu, share) in shares.items()}
    losses |= {arm: {seed: run(*about, seed) for seed in (100, 101, 102)} for arm, about in trained.items()}
    worth = {arm: make_worth(20 * nu, curved=nu) | interval_of(rate=share) for arm, (nu, share) in shares.items()}
    arms = {"dense": FAIR, **dict.fromkeys(shares, FAIR)}
    found = result.judge(losses, {"dense": result.DENSE} | worth, arms, RATE)
    assert found["scores"]["r2_rated"] > 0.999
    assert found["scores"]["root_mean_square_rated"] < 0.2 * found["scores"]["root_mean_square_curved"]
    assert (found["hypotheses"]["H5"], found["hypotheses"]["H7"], found["hypotheses"]["H8"]) == (False, True, True)
    assert result.find_rated(worth, list(shares), RATE) == {"b": 0.002, "e": 0.0025}
    assert found["scores"]["way_back"]["arms"] == ["b", "e"]
    way_back = found["scores"]["way_back"]
    assert 0.8 < way_back["share"] < 1.0
    losses["b"][103] = run(1.0, 0.2, 103)  # a seed that has no run at its own rate
    again = result.judge(losses, {"dense": result.DENSE} | worth, arms, RATE)
    assert again["scores"]["way_back"] == way_back


def test_one_that_is_worse_than_all_its_noise_says_is_outside_of_the_bracket(result: ModuleType) -> None:
    losses = make_losses({"a": 2.0, "b": 8.0, "c": 16.0})
    worth = {"a": make_worth(1.0, curved=0.1), "b": make_worth(1.0, curved=1.0), "c": make_worth(0.0)}
    found = result.judge(losses, worth, dict.fromkeys(worth, FAIR), RATE)
    assert [row["surprise_curved"] > 0.5 for row in found["rows"]] == [True, False, False]
    assert (found["scores"]["bracketed"], found["hypotheses"]["H6"]) == (2, False)


def test_a_biased_method_lies_above_the_line_and_outside_of_its_interval(result: ModuleType) -> None:
    losses = make_losses({"a": 2.0, "b": 8.0, "c": 4.0})
    worth = {"a": make_worth(0.0, bias=0.5), "b": make_worth(1.0), "c": make_worth(3.0)}
    about = {"a": {"unbiased": False}, "b": {"unbiased": True}, "c": {"unbiased": True}}
    found = result.judge(losses, worth, about, RATE)
    biased = found["rows"][0]
    assert biased["surprise"] == pytest.approx(0.6, abs=1e-2)
    assert biased["observed"] > biased["high"]
    assert (found["scores"]["biased"], found["scores"]["biased_above"]) == (1, 1)
    assert found["scores"]["r2"] is None  # two arms are no fit


def test_what_needs_a_batch_below_one_has_no_prediction_and_is_last_in_the_order(result: ModuleType) -> None:
    noise = {"a": 0.0, "b": 3.0, "c": 500.0}
    losses = make_losses({"a": 16.0, "b": 4.0, "c": 1.0})
    worth = {arm: make_worth(nu) for arm, nu in noise.items()}
    found = result.judge(losses, worth, {arm: {"unbiased": True} for arm in noise}, RATE)
    assert found["unpredicted"] == ["c"]
    assert found["scores"]["spearman"] == pytest.approx(1.0)
    assert found["scores"]["unbiased"] == 2


def test_a_prediction_is_as_sure_as_the_batches_that_it_is_read_from(result: ModuleType) -> None:
    """Dense with batches of 2 scatters; with as many more seeds its mean is surer."""
    worth = {"large": make_worth(0.0), "small": make_worth(7.0)}
    arms = make_losses({"large": 16.0, "small": 2.0})
    widths = {}
    for seeds in (2, 8):
        scatter = {seed: {120: 2.6 + 0.3 * (-1) ** seed} for seed in range(seeds)}
        found = result.judge(arms | {"dense-b2-r0.001": scatter}, worth, dict.fromkeys(worth, FAIR), RATE)
        widths[seeds] = [row["high"] - row["low"] for row in found["rows"]]
    assert widths[2][0] == widths[8][0] < 0.1 * widths[8][1]
    assert widths[8][1] < 0.5 * widths[2][1]


def test_a_part_of_a_step_is_not_looked_at(result: ModuleType) -> None:
    losses = make_losses({"a": 2.0, "b": 8.0})
    methods = {"a": FAIR, "b": FAIR, "c": FAIR, "d": {"unbiased": False}}
    losses["dense-b16-r0.001"][100] = make_run(16, 100)
    shown = result.hide_part(losses, methods)
    assert set(shown) == {f"dense-b{batch}-r0.001" for batch in (1, 2, 4, 8, 16, 32)}
    assert set(shown["dense-b16-r0.001"]) == {0, 1, 2}
    losses |= make_losses({"c": 4.0})
    assert result.hide_part(losses, methods).keys() == losses.keys()  # no biased arm
    methods["e"] = {"unbiased": False}
    losses |= make_losses({"d": 4.0})
    assert "d" not in result.hide_part(losses, methods)  # e is missing
    losses |= make_losses({"e": 4.0})
    losses["a"][103] = make_run(2, 103)
    shown = result.hide_part(losses, methods)
    assert set(shown["a"]) == set(shown["e"]) == {100, 101, 102}  # as many seeds as all have


def test_a_biased_arm_that_breaks_down_on_some_seeds_widens_no_interval_but_its_own(result: ModuleType) -> None:
    losses = make_losses({"a": 16.0, "b": 8.0, "c": 16.0})
    worth = {"a": make_worth(0.0), "b": make_worth(1.0), "c": make_worth(0.0, bias=0.5)}
    arms = {"a": FAIR, "b": FAIR, "c": {"unbiased": False}}
    widths = []
    for scatter in (0.0, 3.0):
        losses["c"][101] = {step: loss + scatter for step, loss in make_run(16.0, 101).items()}
        rows = result.judge(losses, worth, arms, RATE)["rows"]
        widths.append([row["high"] - row["low"] for row in rows])
    assert widths[0][:2] == widths[1][:2]
    assert widths[1][2] > 100 * widths[0][2]


def test_one_that_wins_against_its_verdict_is_named(result: ModuleType) -> None:
    """At half of dense's price, with dense's gradient, yet with a verdict that it cannot win."""
    losses = make_losses({"a": 32.0, "b": 8.0, "c": 4.0})
    worth = {"a": make_worth(3.0, price=0.5), "b": make_worth(0.5), "c": make_worth(3.0)}
    found = result.judge(losses, worth, {arm: {"unbiased": True} for arm in worth}, RATE)
    # After 120 steps it is at 1.80; dense with a batch of 8 has as many steps for that price and is at 2.20.
    assert found["scores"]["beat_their_verdict"] == ["a"]
    assert found["hypotheses"]["H4"] is False
    lost = {"nats": pytest.approx(1.0, abs=1e-2), "dense_nats": None}
    assert found["scores"]["regret"] == {"chosen": "b", "best": "a"} | lost


def test_a_choice_before_training_is_offered_no_biased_method(result: ModuleType) -> None:
    """The cheapest has a clear bias and comes out worst; without it the choice is right, and better than dense."""
    losses = make_losses({"dense": 16.0, "a": 16.0, "biased": 1.0, "b": 4.0})
    worth = {
        "dense": result.DENSE,
        "a": make_worth(3.0, price=0.5),
        "biased": make_worth(0.0, price=0.4, bias=0.5),
        "b": make_worth(1.0, curved=1.0),
    }
    found = result.judge(losses, worth, dict.fromkeys(worth, FAIR), RATE)
    regret, fair = found["scores"]["regret"], found["scores"]["fair_regret"]
    assert (regret["chosen"], regret["best"]) == ("biased", "a")
    # 120 steps of a and of the biased one, with batches of 16 and of 1; 60 of dense.
    assert regret["nats"] == pytest.approx(0.8)
    assert fair == {"chosen": "a", "best": "a", "nats": 0.0, "dense_nats": pytest.approx(0.6)}
    assert found["hypotheses"]["H9"] is True
    unfair = {arm: about | interval_of(bias=0.0) for arm, about in worth.items()}
    assert result.judge(losses, unfair, dict.fromkeys(worth, FAIR), RATE)["hypotheses"]["H9"] is False


def test_a_run_that_diverged_comes_out_last_and_is_out_of_the_fit(result: ModuleType) -> None:
    losses = make_losses({"a": 16.0, "b": 4.0, "c": 2.0})
    losses["a"][101] = {}
    worth = {"a": make_worth(0.0), "b": make_worth(3.0), "c": make_worth(7.0)}
    found = result.judge(losses, worth, {arm: {"unbiased": True} for arm in worth}, RATE)
    assert found["rows"][0]["observed"] is None
    assert found["scores"]["unbiased"] == 2
    assert found["scores"]["spearman"] < 0.0


def test_the_page_names_every_arm_and_what_became_of_each_hypothesis(
    result: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = importlib.import_module("exchange_page")
    losses = make_losses({"a": 16.0, "b": 4.0, "c": 2.0, "d": 1.0, "e": 8.0})
    losses["e"][101] = {}  # diverged
    noise = {"a": 0.0, "b": 3.0, "c": 7.0, "d": 500.0, "e": 1.0}
    found = result.judge(losses, {arm: make_worth(nu) for arm, nu in noise.items()}, dict.fromkeys(noise, FAIR), RATE)
    text = page.render([{"task": "known", "rate": RATE, "no_test": ["H9"]} | found])
    assert all(f"<th scope=row>{arm}" in text for arm in noise)
    assert text.count(">none<") == text.count(">diverged<") == 1
    assert "H1 holds: over 3 unbiased arms" in text
    assert "H2 cannot be said yet" in text
    assert text.count("<circle") == 3 + 4  # by curvature d has a prediction, too
    assert "H5 does not hold: with the noise by curvature R² over 4 unbiased arms" in text
    sys.modules.pop("exchange_page")


OUTCOMES = {True: "holds", False: "refused", None: "open"}
PAGES = ("results/screening.md", "guide/answers.md")


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_says_of_the_exchange_rate_is_what_the_archives_say(page: str) -> None:
    """A remark names what a sentence rests on: ``<!-- exchange: far H5 holds, far r2_curved 0.79 -->``."""
    tasks = {task["task"]: task for task in json.loads((ROOT / "docs/results/exchange.json").read_text("utf-8"))}
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    claims = [claim.split() for each in re.findall(r"<!-- exchange: (.*?) -->", text) for claim in each.split(",")]
    assert len(claims) > 4
    for task, what, said in claims:
        known = tasks[task]["hypotheses"] | tasks[task]["scores"]
        found = known[what] if what in known else known["way_back"][what]
        digits = len(said.partition(".")[2])
        assert said == (OUTCOMES[found] if what[0] == "H" else f"{found:.{digits}f}"), (task, what)


def test_labels_lie_on_no_other_and_inside(page: ModuleType) -> None:
    points = [(300.0, 200.0, "one"), (302.0, 201.0, "another"), (612.0, 203.0, "at-the-edge"), (300.0, 199.0, "third")]
    labels = page.name_points(points)
    assert [label["text"] for label in labels] == [text for *_, text in points]
    boxes = [(one["x"], one["x"] + page.LETTER * len(one["text"]), one["y"]) for one in labels]
    for number, (left, right, base) in enumerate(boxes):
        assert left >= page.LEFT
        assert right <= page.RIGHT
        for other_left, other_right, other_base in boxes[:number]:
            assert right <= other_left or other_right <= left or abs(base - other_base) >= page.LINE
    assert len(page.name_points(points[:1] * 9)) < 9  # where nothing is free, nothing is written


def test_the_page_opens_with_what_became_of_each_hypothesis(page: ModuleType) -> None:
    tasks = json.loads((ROOT / "docs/results/exchange.json").read_text())
    shown = [task for task in tasks if task["rows"]]
    for one in page.list_outcomes(shown):
        for task, found in zip(shown, one["tasks"], strict=True):
            assert found == {
                "text": {True: "holds", False: "refused", None: "open"}[task["hypotheses"][one["name"]]],
                "is_test": one["name"] not in task["no_test"],
            }
    assert [one["name"] for one in page.list_outcomes(shown)] == [*shown[0]["hypotheses"]]


def test_advice_is_the_smallest_product_of_what_could_win(result: ModuleType) -> None:
    """The best arm was to be decided by training, and of what could win the one that was expected to wins less."""
    losses = make_losses({"dense": 16.0, "best": 32.0, "named": 24.0, "also": 28.0})
    about = {"best": ("decide by training", 0.5, 0.1), "named": ("could", 0.8, 0.2), "also": ("could", 0.9, 0.3)}
    worth = {arm: make_worth(nu, price) | {"verdict": verdict} for arm, (verdict, price, nu) in about.items()}
    worth["dense"] = result.DENSE
    methods = dict.fromkeys(worth, FAIR)
    found = result.judge(losses, worth, methods, RATE)
    assert (found["scores"]["advice"]["named"], found["scores"]["advice"]["chosen"]) == (["also", "named"], "named")
    steps = 0.01 * (60 / 0.8 - 60)
    assert found["scores"]["advice"]["gain"] == pytest.approx(0.2 * math.log2(24 / 16) + steps, abs=1e-3)
    assert found["hypotheses"]["H10"] is True
    losses["named"] = {seed: make_run(2.0, seed) for seed in (100, 101, 102)}
    assert result.judge(losses, worth, methods, RATE)["hypotheses"]["H10"] is False
    worth["named"]["verdict"] = worth["also"]["verdict"] = "cannot beat a smaller batch"
    assert result.judge(losses, worth, methods, RATE)["hypotheses"]["H10"] is None
