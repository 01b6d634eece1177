"""What the archives of the leaderboard say, as rows: every number and every outcome is `sparsebp compare`'s.

The baseline of a task is the best of its controls, chosen by the validation metric; arms are compared with it on the
test split. Rows of others come from `v1/submissions/NAME`, each beside the controls of its own archive.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from leaderboard_run import CONTROLS, FOLDER, SPARSEBP, find_commits_of

VALIDATION = "eval/loss"
STATED = ("lower", "higher", "no difference shown")  # outcomes that the page counts, even where there is none


@dataclass(frozen=True)
class Row:
    """One arm of a task."""

    arm: str
    is_control: bool
    is_best: bool  # the baseline of its comparison
    outcome: str
    mean: float | None
    sd: float | None
    seeds: int
    difference: float | None
    low: float | None
    high: float | None
    batch: int
    rate: float
    steps: int
    flops: float | None  # of a run, over the best control's
    seconds: float | None  # of the CPU, likewise
    reaches: str  # the best control's validation loss: after which share of the budget, or by how many of its runs
    worth: dict[str, Any] = field(default_factory=dict)  # what was predicted before it was trained
    options: str = ""
    verdict: str = ""
    runs: tuple[str, ...] = ()
    others: str = ""  # who submitted it; empty: ours

    @property
    def is_good(self) -> bool:
        """Whether it is shown to be lower than the best control: all tasks are compared by their loss."""
        return self.outcome in {"lower", "better"}


@dataclass(frozen=True)
class Result:
    """One task, trained or not."""

    name: str
    title: str
    study: dict[str, Any]
    rows: tuple[Row, ...] = ()
    metric: str = ""
    best: str = ""
    commits: tuple[str, ...] = ()
    data: str = ""
    edges: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    runs: tuple[dict[str, Any], ...] = ()

    @property
    def is_trained(self) -> bool:
        """Whether its archive is there."""
        return bool(self.rows)

    def find(self, arm: str) -> Row | None:
        """Return the row of an arm; None without one."""
        return next((row for row in self.rows if row.arm == arm), None)


def read_result(folder: Path, name: str) -> Result:
    """Return what is known of a task of a folder."""
    file = folder / f"{name}.yaml"
    text = file.read_text(encoding="utf-8")
    title = text.split("\n", 1)[0].removeprefix("# ").rstrip(".")
    study = yaml.safe_load(text)
    archive, worth = folder / f"{name}.tar.gz", folder / f"{name}-worth.json"
    if not archive.exists():
        return Result(name, title, study)
    known = json.loads(worth.read_text(encoding="utf-8")) if worth.exists() else {}
    comparison = compare_with_best(archive, study)
    reach = find_reach(archive, study, comparison)
    rows = [make_row(group, study, comparison, reach, known) for group in comparison["groups"]]
    rows += [row for other in sorted(folder.glob("submissions/*/submission.yaml")) for row in read_others(other, name)]
    commits, data = find_commits_of(archive)
    return Result(
        name,
        title,
        study,
        tuple(sorted(rows, key=lambda row: (row.difference is None, row.difference or 0.0))),
        comparison["metric"],
        comparison["groups"][0]["label"],
        commits,
        data,
        tuple(json.loads(call("study", str(file), "--from", str(archive), "-o", "json", check=False))["notes"]),
        tuple(comparison["warnings"]),
        tuple(run for run in comparison["runs"] if run["counts"]),
    )


def read_others(file: Path, task: str) -> Iterator[Row]:
    """Yield the rows of a submission, if it is one of a task."""
    about = yaml.safe_load(file.read_text(encoding="utf-8"))
    if about["task"] != task:
        return
    study = yaml.safe_load((file.parent / about.get("study", "study.yaml")).read_text(encoding="utf-8"))
    archive = file.parent / about.get("archive", "study.tar.gz")
    comparison = compare_with_best(archive, study)
    reach = find_reach(archive, study, comparison)
    for group in comparison["groups"]:
        if group["label"] in about["methods"]:
            yield make_row(group, study, comparison, reach, {}, others=", ".join(about["authors"]))


def call(*words: str, check: bool = True) -> str:
    """Call sparsebp, and return what it prints."""
    return subprocess.run([*SPARSEBP, *words], check=check, text=True, stdout=subprocess.PIPE).stdout


def compare(archive: Path, study: dict[str, Any], *more: str) -> Any:
    """Return the comparison of a study's report."""
    return json.loads(call("compare", "--study", study["study"], "--from", str(archive), *more, "-o", "json"))


def compare_with_best(archive: Path, study: dict[str, Any]) -> Any:
    """Return the comparison with the best control, by validation."""
    first = compare(archive, study, "--metric", VALIDATION)
    controls = [group for group in first["groups"] if group["label"] in CONTROLS]
    best = min(controls, key=lambda group: float(group["quality"]["final"]["mean"]))
    return compare(archive, study, "--baseline", best["label"])


def find_reach(archive: Path, study: dict[str, Any], comparison: dict[str, Any]) -> dict[str, str]:
    """Return after which share of its budget each arm has the validation loss with which the best control ends; where
    not every run comes there, how many do."""
    best = comparison["groups"][0]["label"]
    first = compare(archive, study, "--metric", VALIDATION, "--baseline", best)
    target = first["groups"][0]["quality"]["final"]["mean"]
    found = compare(archive, study, "--metric", VALIDATION, "--baseline", best, "--reach", repr(target))
    shares: dict[str, str] = {}
    for group in found["groups"]:
        reach, steps = group["quality"]["reach"], group["recipe"]["training"]["max_steps"]
        if reach is not None and not group["baseline"]:
            is_whole = reach["reached"] == reach["of"] and reach["steps"] is not None
            share = f"{reach['steps']['mean'] / steps:.2f}" if is_whole else ""
            shares[group["label"]] = share or f"{reach['reached']} of {reach['of']} runs"
    return shares


def make_row(
    group: dict[str, Any],
    study: dict[str, Any],
    comparison: dict[str, Any],
    reach: dict[str, str],
    worth: dict[str, Any],
    *,
    others: str = "",
) -> Row:
    """Return the row of one group."""
    final, difference = group["quality"]["final"] or {}, group["quality"]["difference"] or {}
    training, speed, label = group["recipe"]["training"], group["speed"], group["label"]
    return Row(
        label,
        label in CONTROLS,
        group["baseline"],
        "best control" if group["baseline"] else group["statements"][0]["outcome"],
        final.get("mean"),
        final.get("sd"),
        final.get("n", 0),
        0.0 if group["baseline"] else difference.get("mean"),
        difference.get("family_low"),
        difference.get("family_high"),
        training["per_device_train_batch_size"],
        training["learning_rate"],
        training["max_steps"],
        1.0 if group["baseline"] else (speed["spent_ratio"] or {}).get("mean"),
        1.0 if group["baseline"] else (speed["seconds_ratio"] or {}).get("mean"),
        reach.get(label, ""),
        worth.get(label, {}),
        json.dumps(study["arms"].get(label, {})),
        group["verdict"],
        tuple(run["run_id"] for run in comparison["runs"] if run["group"] == group["group"] and run["counts"]),
        others,
    )


def list_methods(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return every method with who submitted it, those of ours in the order of the studies."""
    ours = dict.fromkeys((arm, "") for one in results for arm in one.study["arms"] if arm not in CONTROLS)
    theirs = dict.fromkeys((row.arm, row.others) for one in results for row in one.rows if row.others)
    return [*ours, *theirs]


def list_controls(results: Sequence[Result]) -> list[str]:
    """Return every control of a task."""
    return [*dict.fromkeys(arm for one in results for arm in one.study["arms"] if arm in CONTROLS)]


def read_results(folder: Path = FOLDER) -> list[Result]:
    """Return all tasks, in the order of the rules."""
    rules = yaml.safe_load((folder / "rules.yaml").read_text(encoding="utf-8"))
    return [read_result(folder, name) for name in rules["tasks"]]
