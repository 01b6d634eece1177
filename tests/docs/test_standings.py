"""The table of twelve equally tuned methods says what `study --from` and `compare` say of the archived trials."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.block import ROOT

FOLDER = ROOT / "docs" / "results" / "spelling"
TEXT = (ROOT / "docs" / "results" / "standings.md").read_text(encoding="utf-8")
SAID = " ".join(TEXT.split())
ROW = re.compile(r"^\| ([\w-]+) \| (\d\.\d+) \| (?:(.*?) )?\| (.*) \|$", re.MULTILINE)
# Trainings of unequal length are lower or higher. Of equal length they are better or worse, which the page tells alike.
STATED = {"better": "lower", "worse": "higher"}


@pytest.fixture(scope="module")
def archive() -> Path:
    """An archive of the study's trials, made of their values."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    found: Path = importlib.import_module("thin").find_archive(FOLDER / "spelling")
    patch.undo()
    return found


def ask(*words: str) -> Any:
    """Return what a command answers as data."""
    run = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()", *words, "-o", "json"]
    return json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_every_row_is_what_compare_says_of_the_archived_trials(archive: Path) -> None:
    found = ask("compare", "--study", "leaderboard-1-spelling", "--from", str(archive))
    rows = {name: (mean, difference, stated) for name, mean, difference, stated in ROW.findall(TEXT)}
    assert [*rows] == [group["label"] for group in found["groups"]]
    assert len(rows) == 15
    steps = {group["label"]: group["recipe"]["training"]["max_steps"] for group in found["groups"]}
    # Both spend the same FLOPs, in batches of one.
    assert f"a step of `lossless` costs {steps['dense'] / steps['lossless']:.2f} of dense's" in SAID
    for group in found["groups"]:
        mean, difference, stated = rows[group["label"]]
        assert f"{group['quality']['final']['mean']:.3f}" == mean
        if group["baseline"]:
            assert (group["label"], difference, stated) == ("dense", "", "control")
            continue
        said = group["quality"]["difference"]
        values = [float(value) for value in re.findall(r"[-+]\d+(?:\.\d+)?", difference)]
        digits = max(len(value.partition(".")[2]) for value in re.findall(r"[\d.]+", difference))
        assert values == [round(said[key], digits) for key in ("mean", "family_low", "family_high")]
        outcome = group["statements"][0]["outcome"]
        assert stated.removeprefix("control, ") == STATED.get(outcome, outcome)
    stated = [row[2] for row in rows.values()]
    assert "lower" not in stated
    assert "Six methods are shown to be higher" in SAID
    assert stated.count("higher") == 6


@pytest.mark.slow
def test_the_same_values_are_chosen_from_the_archived_trials(archive: Path) -> None:
    found = ask("study", str(FOLDER / "spelling.yaml"), "--from", str(archive))
    assert found["is_as_chosen"]
    assert f"The study has {found['num_trials']} trials" in SAID
    rate, batch = found["notes"]
    at_edge = "is the least of its grid (extended 1x)"
    assert batch.endswith(f"training.per_device_train_batch_size=1 {at_edge}")
    assert rate.endswith(f"training.learning_rate=0.0003333 {at_edge}")
    arms, slow = (len(note.partition(":")[0].split(",")) for note in (batch, rate))
    assert f"{arms} of the 14 tuned arms have their lowest validation loss at batches of 1" in SAID
    assert f"and {slow} of them at the lowest rate" in SAID


def test_the_predicted_cost_of_lossless_is_what_worth_measured() -> None:
    worth = json.loads((FOLDER / "spelling-worth.json").read_text(encoding="utf-8"))
    assert f"{worth['lossless']['price']['value']:.2f} at the batch of 16 for which it was predicted" in SAID


def test_the_page_says_what_simulated_studies_of_equal_methods_state() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "tuning-unequal.json").read_text(encoding="utf-8"))
    false, power = (max(row[key] for row in record["rows"]) for key in ("false", "power_4"))
    assert f"In {record['studies']:,} simulated studies of equal methods" in SAID
    assert f"at most {false:.1%} state a difference".replace("%", " %") in SAID
    assert f"Power is low: {power:.2f} or less for four standard deviations" in SAID
