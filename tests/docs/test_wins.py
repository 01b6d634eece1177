"""The page of what wins at half of dense's price says what its runs hold, as it was registered."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.docs.block import ROOT

RESULTS = ROOT / "docs" / "results"
FOLDER = RESULTS / "wins"
PAGE = (RESULTS / "wins.md").read_text(encoding="utf-8")
TASKS = ("pronounce", "genre")
ARCHIVED = sorted(file.name.partition(".")[0] for file in FOLDER.glob("*.parquet"))
SEEDS = list(range(100, 110))


@pytest.fixture
def wins(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("wins")
    sys.modules.pop("wins", None)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("generator.wins")


def read(task: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"wins-{task}.json").read_text(encoding="utf-8"))


def is_trained(task: str) -> bool:
    """Whether the values of the task are there. Without them nothing may be reported."""
    trained = task in ARCHIVED
    assert trained == (RESULTS / f"wins-{task}.json").exists() == (RESULTS / f"wins-{task}.txt").exists()
    return trained


def test_the_page_says_which_tasks_have_no_report_yet(wins: ModuleType) -> None:
    row, under = (
        re.findall(r"^\| \*(\w+)\*", PAGE.partition("<!-- end of wins -->")[0], re.MULTILINE),
        re.search(r"without a report yet: (.*)\.$", PAGE, re.MULTILINE),
    )
    missing = re.findall(r"\*(\w+)\*", under[1]) if under else []
    assert sorted(row) == ARCHIVED
    assert sorted([*row, *missing]) == sorted(wins.TASKS)
    assert {file.name for file in FOLDER.glob("*-study.yaml")} == {f"{task}-study.yaml" for task in wins.TASKS}


def shorten(text: str) -> Any:
    """Return JSON with 12 digits of each number: processors differ in the last bits of a sum."""
    return json.loads(text, parse_float=lambda digits: float(f"{float(digits):.12g}"))


def test_a_new_key_of_a_recipe_which_is_null_changes_no_report(wins: ModuleType) -> None:
    kept = (RESULTS / "fast.json").read_text(encoding="utf-8")
    found = json.loads(kept)
    for group in found["groups"]:
        group["recipe"]["training"]["new_key"] = group["recipe"]["new_key"] = None
    assert wins.shorten(json.dumps(found)) == kept


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_reports_come_again_from_the_values(wins: ModuleType, task: str) -> None:
    for name, text in (wins.report(task) if is_trained(task) else {}).items():
        kept = (RESULTS / name).read_text(encoding="utf-8")
        assert (shorten(text) == shorten(kept)) if name.endswith(".json") else text == kept


@pytest.mark.parametrize("task", TASKS)
def test_the_choices_come_again_from_the_values(wins: ModuleType, task: str, tmp_path: Path) -> None:
    if not is_trained(task):
        return
    words = ["study", str(FOLDER / f"{task}-study.yaml"), "--from", str(wins.find_archive(FOLDER / task))]
    done = subprocess.run(
        [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()", *words],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"SPARSEBP_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as the study chose" in done.stdout


@pytest.mark.parametrize("task", TASKS)
def test_what_was_registered_is_what_is_reported(wins: ModuleType, task: str) -> None:
    """All seeds of all arms, half of the FLOPs for `lossless` in each run, and the margin of the protocol."""
    study = yaml.safe_load((FOLDER / f"{task}-study.yaml").read_text(encoding="utf-8"))
    assert study["budget"]["part"] == {"lossless": 0.5}
    assert study["seeds"]["report"] == "100-109"
    assert f"**{wins.MARGIN}**" in (FOLDER / "PROTOCOL.md").read_text(encoding="utf-8")
    if not is_trained(task):
        return
    found = read(task)
    runs = {(run["label"], run["seed"]) for run in found["runs"] if run["state"] == "finished"}
    assert runs == {(arm, seed) for arm in study["arms"] for seed in SEEDS}
    assert found["margin"] == wins.MARGIN
    groups = {group["label"]: group for group in found["groups"]}
    assert groups[wins.find_best_dense(found)]["baseline"]
    assert groups["lossless"]["speed"]["cost"]["mean"] <= 0.51, "a step is whole, and so is the last one"


def test_the_best_dense_is_that_of_lower_validation_loss(wins: ModuleType) -> None:
    losses = {"dense": (1.0, 1.4), "dense-by-length": (1.3, 1.0), "lossless": (0.1, 0.1)}
    runs = [
        {"label": arm, "curves": {"eval/loss": [[0, 7.0, None], [9, loss, None]]}}
        for arm, some in losses.items()
        for loss in some
    ]
    assert wins.find_best_dense({"runs": runs}) == "dense-by-length"


def test_a_row_says_what_the_comparison_says(generator: ModuleType) -> None:
    def group(label: str, steps: int, loss: float, **more: object) -> dict[str, object]:
        training = {"max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 0.002, "group_by": "length"}
        return {"label": label, "baseline": False, "recipe": {"training": training}, **more}

    ratio = {"mean": 0.5, "low": 0.49, "high": 0.51}
    gap = {"mean": -0.05, "family_low": -0.08, "family_high": 0.031}
    final = {"mean": 1.5, "sd": 0.04}
    quality = {"final": final, "difference": gap, "not_worse": {"answer": "yes"}}
    speed = {"cost": ratio, "seconds_ratio": None, "step_price": 0.314}
    dense = group("dense", 100, 1.5, quality={"final": final}) | {"baseline": True}
    runs = [
        {"label": arm, "seed": seed, "quality": loss + seed / 10}
        for arm, loss in (("dense", 1.0), ("lossless", 1.25))
        for seed in range(3)
    ]
    groups = [dense, group("lossless", 150, 1.5, quality=quality, speed=speed)]
    row = generator.show("a", {"groups": groups, "runs": runs})
    assert row == [
        "*a*",
        "100 steps of 4, rate 0.002, by length",
        "1.500 ± 0.040",
        "150",
        "1.500 ± 0.040",
        "-0.050 (-0.080 to +0.031)",
        "+0.250 (+0.250 to +0.250)",
        "0.50 (0.49 to 0.51)",
        "-",
        "0.31",
        "yes",
    ]


def test_from_two_examples_half_of_the_price_pays_for_more_steps_than_all_of_dense() -> None:
    """What the page says of a given batch; of one example alone the contrary is there."""
    assert "**On these two tasks, with a given batch of 2 or larger, half of the FLOPs pay for more steps" in PAGE
    for task in ARCHIVED:
        for row in json.loads((RESULTS / f"wins-{task}-steps.json").read_text(encoding="utf-8")):
            assert (row["lossless"] > row["dense"]) == (row["batch"] > 1)


def test_every_claim_of_the_page_stands_in_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    study = importlib.import_module("generator.study")
    assert len(study.CLAIM.findall(PAGE)) == PAGE.count("<!-- claim: ") >= len(ARCHIVED)
    assert study.find_broken(ROOT, PAGE) == []


def test_every_figure_of_the_text_stands_in_the_table_or_the_reports() -> None:
    there = "".join(file.read_text(encoding="utf-8") for file in [*RESULTS.glob("wins-*.txt"), FOLDER / "PROTOCOL.md"])
    parts = re.split(r"<!-- (?:end of )?(?:wins|steps) -->", PAGE)  # text and tables in turns
    figures = re.findall(r"\d+\.\d+", re.sub(r"<!-- claim.*?-->", "", "".join(parts[::2])))
    assert len(parts) == 5
    assert [figure for figure in figures if figure not in there + "".join(parts[1::2])] == []
