"""The judgement of the test of cause, tried on rises that are known."""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "results" / "cause"
RISE = {16: 0.0, 12: 0.03, 8: 0.1, 4: 0.2, 2: 0.3, 1: 0.4}  # of dense, by its batch
METHODS = {"crs-10": 1.0, "mvue-1-4": 3.0, "dither-2": 7.0}


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("cause_result")
    sys.modules.pop("cause_result", None)


def make_runs(factors: dict[str, float], rounds: int = 3) -> list[dict[str, Any]]:
    """Runs in which each shape's rise is dense's times a factor; methods do as their noise says."""
    arms = {f"dense-{size}": rise for size, rise in RISE.items()}
    arms |= {f"slow-{share}": 1.0 - share for share in (0.5, 0.25, 0.1, 0.0)}
    for shape, factor in factors.items():
        is_batch = shape == "batch"
        for level in (1, 3) if is_batch else (0.01, 0.1, 1):
            arms[f"{shape}-{level}"] = factor * rise_of(level)
        arms[f"{shape}-1-first"] = factor * RISE[8]
        level = 1 if is_batch else 0.1
        arms |= {f"{shape}-{level}-first": factor * rise_of(level), f"{shape}-{level}-second": 0.1 * rise_of(level)}
    arms |= {arm: RISE[int(16 / (1 + nu))] for arm, nu in METHODS.items()}
    found = []
    for number in range(rounds):
        for arm, rise in arms.items():
            for seed in (number, number + 100) if arm.startswith("dense") else (number,):
                loss = 3.0 + 0.1 * (seed % 7) + rise * (1.0 + 0.05 * (number - 1))
                found.append({"task": "one", "arm": arm, "seed": str(seed), "loss": str(loss), "log_root": "-7.0"})
    return found


def rise_of(noise: float) -> float:
    """Dense's rise at the batch with so much noise, linear in its logarithm."""
    batches = sorted(RISE)
    return float(np.interp(math.log(16 / (1 + noise)), np.log(batches), [RISE[batch] for batch in batches]))


def make_measured() -> dict[str, Any]:
    """Noise by curvature that is what the methods do, and ten times as much in all directions; half of the rate."""
    point: dict[str, Any] = {"batch-of-16": [{"plain": 1.0, "curved": 1.0}]}
    point |= {shape: [{"plain": 10.0, "curved": 1.0}] for shape in ("batch", "isotropic", "projection")}
    point |= {arm: [{"plain": 10.0 * nu, "curved": nu}] for arm, nu in METHODS.items()}
    arms = [f"{shape}-{n}" for shape in ("isotropic", "projection") for n in (0.01, 0.1, 1)]
    point["rates"] = dict.fromkeys((*arms, *METHODS), 0.5) | {f"dense-{size}": 1.0 for size in RISE}
    return {"one": {"points": {"10": point, "20": point}}}


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [
        ({"batch": 1.0, "isotropic": 1.1, "projection": 0.9}, "cause"),
        ({"batch": 1.0, "isotropic": 2.0, "projection": 1.0}, "refused"),
        ({"batch": 1.0, "isotropic": 1.0, "projection": 0.3}, "refused"),
        ({"batch": 2.0, "isotropic": 1.0, "projection": 1.0}, "open"),
    ],
)
def test_the_verdict_is_that_of_the_protocol(result: ModuleType, factors: dict[str, float], verdict: str) -> None:
    found = result.judge(make_measured(), make_runs(factors))
    assert found["rounds"] == 3
    assert found["verdict"] == verdict
    slopes = {shape: slope["value"] for shape, slope in found["tasks"]["one"]["slopes"].items()}
    assert slopes == pytest.approx(factors)


def test_a_wide_interval_is_open(result: ModuleType) -> None:
    assert result.decide(1.0, 0.2)["outcome"] == "on"
    assert result.decide(1.0, 0.5)["outcome"] == "open"
    assert result.decide(1.5, 0.5)["outcome"] == "open"
    assert result.decide(1.5, 0.1)["outcome"] == "off"


def test_each_predictor_is_scored_by_what_it_says(result: ModuleType) -> None:
    factors = dict.fromkeys(("batch", "isotropic", "projection"), 1.0)
    scores = result.judge(make_measured(), make_runs(factors))["tasks"]["one"]["predictors"]
    for group in ("added", "methods"):
        assert scores[group]["curved"]["root_mean_square"] == pytest.approx(0.0, abs=1e-9)
        assert scores[group]["curved and rate"]["root_mean_square"] == pytest.approx(0.5)
        assert scores[group]["all"]["root_mean_square"] > 0.02
    assert scores["noise"]["isotropic-0.1"] == pytest.approx({"all": 1.0, "curved": 0.1, "rate": 0.5})


def test_the_share_of_the_second_moment_is_its_rise_alone(result: ModuleType) -> None:
    found = result.judge(make_measured(), make_runs({"batch": 1.0, "isotropic": 0.5, "projection": 1.0}))
    shares = {shape: share["value"] for shape, share in found["tasks"]["one"]["second"].items()}
    assert shares == pytest.approx({"batch": 0.1, "isotropic": 0.2, "projection": 0.1})


def test_a_round_counts_when_every_arm_has_it(result: ModuleType) -> None:
    runs = make_runs(dict.fromkeys(("batch", "isotropic", "projection"), 1.0))
    assert result.judge(make_measured(), runs[:-1])["rounds"] == 2


def read_runs() -> list[dict[str, str]]:
    texts = [file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.csv"))]
    return [row for text in texts for row in csv.DictReader(text.splitlines())]


def test_the_page_says_what_the_runs_say(result: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a whole round there is no summary, and the page says so."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    describe = importlib.import_module("generator.cause").describe
    measured, runs, file = (
        json.loads((FOLDER / "measured.json").read_text("utf-8")),
        read_runs(),
        FOLDER / "summary.json",
    )
    if file.exists():
        assert json.loads(json.dumps(result.judge(measured, runs))) == json.loads(file.read_text(encoding="utf-8"))
    else:
        losses: dict[str, dict[str, dict[int, float]]] = {name: {} for name in measured}
        for run in runs:
            losses[run["task"]].setdefault(run["arm"], {})[int(run["seed"])] = float(run["loss"])
        assert not runs or result.find_rounds(losses) == []
    assert describe(FOLDER) in (ROOT / "docs" / "results" / "screening.md").read_text(encoding="utf-8")


def test_the_page_says_what_was_measured(result: ModuleType) -> None:
    measured = json.loads((FOLDER / "measured.json").read_text(encoding="utf-8"))
    assert list(measured) == ["far", "names"]
    text = " ".join((ROOT / "docs" / "results" / "screening.md").read_text(encoding="utf-8").split())

    def ratios(arm: str, digits: int = 0) -> str:
        found = [result.find_noise(task, arm) for task in measured.values()]
        return " and ".join(f"{one['all'] / one['curved']:.{digits}f}" for one in found)

    assert f"isotropic noise has {ratios('isotropic-1')} times a batch's variance" in text
    assert f"a projection's {ratios('projection-1')} times" in text
    assert f"{ratios('gact-2')} for `gact`, {ratios('random-rows-25', 1)} for `random`" in text


@pytest.mark.parametrize(("factor", "said"), [(1.0, "is the cause"), (3.0, "is not the cause by itself")])
def test_a_verdict_is_told_as_it_fell(
    result: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, factor: float, said: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    describe = importlib.import_module("generator.cause").describe
    found = result.judge(make_measured(), make_runs({"batch": 1.0, "isotropic": factor, "projection": 1.0}))
    (tmp_path / "summary.json").write_text(json.dumps(found), encoding="utf-8")
    text = describe(tmp_path)
    assert f"**Verdict after 3 rounds: variance by curvature {said}.**" in text
    outcome = "holds" if factor == 1.0 else "refused"
    assert f"| C1: so are isotropic noise and that of a projection | {outcome} |" in text
    assert "| C0: noise of the batch's shape is on dense's curve | holds |" in text
    assert text.count("| dense-8 |") == text.count("| isotropic-0.1-second |") == 1


def test_the_code_is_that_which_was_registered() -> None:
    protocol = (FOLDER / "PROTOCOL.md").read_text(encoding="utf-8")
    for name in ("cause.py", "cause_result.py"):
        assert hashlib.sha256((ROOT / "benchmarks" / name).read_bytes()).hexdigest() in protocol
