"""The climb that is committed is that of the script, and its numbers follow from its own log."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]


@pytest.fixture
def log() -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / "judge-climb.json").read_text(encoding="utf-8"))


def test_the_proposals_are_those_of_the_script_and_half_are_nulls(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import judge_climb

    assert [one["proposal"] for one in log["proposals"]] == judge_climb.PROPOSALS
    assert [one["null"] for one in log["proposals"]] == [one in judge_climb.NULLS for one in judge_climb.PROPOSALS]
    assert (len(log["proposals"]), sum(one["null"] for one in log["proposals"])) == (30, 15)
    assert log["start"] == [*judge_climb.START]
    assert log["seeds"] == [*judge_climb.FINAL_SEEDS]
    # A null sets keys that nothing else sets, or it could take back a change that was kept.
    keys = {
        name: {change.partition("=")[0] for one in some for change in one.split(" ")}
        for name, some in (("null", judge_climb.NULLS), ("real", judge_climb.REAL))
    }
    assert keys["null"] & keys["real"] == set()


def test_what_was_kept_and_shown_follows_from_the_looks(log: Any) -> None:
    for rule in ("naive", "judge"):
        kept = [one for one in log["proposals"] if one[rule]["kept"]]
        assert log["winners"][rule]["kept"] == [one["proposal"] for one in kept]
    assert all(one["naive"]["kept"] == (one["naive"]["gain"] > 0.0) for one in log["proposals"])
    assert all(one["judge"]["kept"] == (one["judge"]["outcome"] == "better") for one in log["proposals"])
    shown = sum(one["naive"]["gain"] for one in log["proposals"] if one["naive"]["kept"])
    assert log["winners"]["naive"]["shown"] == pytest.approx(shown)
    fresh = [statistics.fmean(one["judge"]["looks"]["gain"]) for one in log["proposals"] if one["judge"]["kept"]]
    assert log["winners"]["judge"]["shown"] == pytest.approx(sum(fresh))
    assert log["winners"]["judge"]["runs"] == sum(one["judge"]["runs"] for one in log["proposals"])


def test_the_gains_on_fresh_seeds_have_students_interval(log: Any) -> None:
    for winner in log["winners"].values():
        gains, true = winner["true"]["gains"], winner["true"]
        low, high = stats.t.interval(0.95, len(gains) - 1, statistics.fmean(gains), stats.sem(gains))
        assert (true["low"], true["mean"], true["high"]) == pytest.approx((low, statistics.fmean(gains), high))
    pairs = zip(*(log["winners"][rule]["true"]["gains"] for rule in ("naive", "judge")), strict=True)
    apart = [one - other for one, other in pairs]
    low, high = stats.t.interval(0.95, len(apart) - 1, statistics.fmean(apart), stats.sem(apart))
    text = (ROOT / "docs" / "results" / "judge.md").read_text(encoding="utf-8")
    assert f"{statistics.fmean(apart):.3f} better than the judge's ({low:.3f} to {high:.3f})" in text
