"""What the archives of the leaderboard say, as rows: every number and every outcome is `sparsebp compare`'s.

The baseline of a task is the best of its controls with trials of their own, chosen by the validation metric; arms are
compared with it on the test split. An archive from which other choices follow is refused. Rows of others come from
`v1/submissions/NAME`, each beside the controls of its own archive.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from leaderboard_run import CONTROLS, FOLDER, SPARSEBP, find_commits_of
from thin import find_archive, has_archive

VALIDATION = "eval/loss"
STATED = ("lower", "higher", "no difference shown")  # outcomes that the page counts, even where there is none
# Trainings of equal length are better or worse. Here the length follows from the budget, so it says no more than these.
OUTCOMES = {"better": "lower", "worse": "higher"}
SAID = ("quality", "common step")  # what is told of a comparison: its controls of equal cost are arms of their own here
BY_DESIGN = ("the baseline was chosen", " differs from the baseline in more than the policy")  # warnings


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
    runs: tuple[dict[str, Any], ...] = ()
    others: str = ""  # who submitted it; empty: ours
    cites: str = ""  # of one that others submitted
    best: str = ""  # the control that it is compared with

    @property
    def is_good(self) -> bool:
        """Whether it is shown to be lower than the best control: all tasks are compared by their loss."""
        return self.outcome == "lower"

    @property
    def key(self) -> str:
        """Its name on the page: two may submit arms of one name, and so may we."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.arm} {self.others}".lower()).strip("-")


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
    measured: str = ""  # the batch and rate at which predictions were measured

    @property
    def is_trained(self) -> bool:
        """Whether its archive is there."""
        return bool(self.rows)

    def find(self, arm: str, others: str = "") -> Row | None:
        """Return the row of an arm, ours or the one that others submitted; None without one."""
        return next((row for row in self.rows if (row.arm, row.others) == (arm, others)), None)


def read_result(folder: Path, name: str) -> Result:
    """Return what is known of a task of a folder."""
    file = folder / f"{name}.yaml"
    text = file.read_text(encoding="utf-8")
    title = text.split("\n", 1)[0].removeprefix("# ").rstrip(".")
    study = yaml.safe_load(text)
    worth = folder / f"{name}-worth.json"
    if not has_archive(folder / name):
        return Result(name, title, study)
    archive = find_archive(folder / name)
    known = json.loads(worth.read_text(encoding="utf-8")) if worth.exists() else {}
    rebuilt = json.loads(call("study", str(file), "--from", str(archive), "-o", "json", check=False))
    if not rebuilt["is_as_chosen"]:
        raise SystemExit(f"{archive}: {'; '.join(rebuilt['faults'][:3]) or 'other choices follow from its trials'}")
    comparison = compare_with_best(archive, study)
    rows = [make_row(group, study, comparison, known) for group in comparison["groups"]]
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
        tuple(rebuilt["notes"]),
        tuple(text for text in comparison["warnings"] if not any(words in text for words in BY_DESIGN)),
        find_measured(file.parent / study["base"], study),
    )


def read_others(file: Path, task: str) -> Iterator[Row]:
    """Yield the rows of a submission, if it is one of a task."""
    about = yaml.safe_load(file.read_text(encoding="utf-8"))
    if about["task"] != task:
        return
    study = yaml.safe_load((file.parent / about.get("study", "study.yaml")).read_text(encoding="utf-8"))
    archive = find_archive(file.parent / about.get("archive", "study.tar.gz").removesuffix(".tar.gz"))
    comparison = compare_with_best(archive, study)
    for group in comparison["groups"]:
        if group["label"] in about["methods"]:
            row = make_row(group, study, comparison, {})
            yield replace(row, others=", ".join(about["authors"]), cites=about["cites"])


def find_measured(base: Path, study: dict[str, Any]) -> str:
    """Return the batch and the rate at which `leaderboard_run.py` measures what is predicted: those of the file, since
    it does so before anything is tuned."""
    training = yaml.safe_load(base.read_text(encoding="utf-8"))["training"]
    return f"{training['per_device_train_batch_size']}, {float(study['vary']['training.learning_rate'][0]):g}"


def call(*words: str, check: bool = True) -> str:
    """Call sparsebp, and return what it prints."""
    return subprocess.run([*SPARSEBP, *words], check=check, text=True, stdout=subprocess.PIPE).stdout


def compare(archive: Path, study: dict[str, Any], *more: str) -> Any:
    """Return the comparison of a study's report."""
    return json.loads(call("compare", "--study", study["study"], "--from", str(archive), *more, "-o", "json"))


def compare_with_best(archive: Path, study: dict[str, Any]) -> Any:
    """Return the comparison with the best control, by validation. One that takes the values of another has no trials of
    its own, and is that one in another form."""
    first = compare(archive, study)
    controls = [arm for arm in study["arms"] if arm in CONTROLS and arm not in study.get("shares", {})]
    best = min(controls, key=lambda arm: fmean(find_last(first, arm)))
    return first if first["groups"][0]["label"] == best else compare(archive, study, "--baseline", best)


def find_curves(comparison: dict[str, Any], arm: str) -> list[list[tuple[int, float]]]:
    """Return step and validation loss of all evaluations of each run of an arm."""
    runs = [run for run in comparison["runs"] if run["label"] == arm and run["counts"]]
    return [[(int(point[0]), float(point[-1])) for point in run["curves"][VALIDATION]] for run in runs]


def find_last(comparison: dict[str, Any], arm: str) -> list[float]:
    """Return the last validation loss of each run of an arm."""
    return [curve[-1][1] for curve in find_curves(comparison, arm)]


def find_reach(comparison: dict[str, Any], arm: str, steps: int) -> str:
    """Return after which share of its steps an arm has the validation loss with which the best control ends; where not
    every run comes there, how many do. A run's own evaluations count, so the share is as fine as they are."""
    best = comparison["groups"][0]["label"]
    target = fmean(find_last(comparison, best))
    curves = find_curves(comparison, arm)
    found = [next((step for step, loss in curve if loss <= target), None) for curve in curves]
    reached = [step for step in found if step is not None]
    if len(reached) < len(curves):
        return f"{len(reached)} of {len(curves)} runs"
    return f"{fmean(reached) / steps:.2f}" if reached else ""


def make_row(
    group: dict[str, Any],
    study: dict[str, Any],
    comparison: dict[str, Any],
    worth: dict[str, Any],
) -> Row:
    """Return the row of one group."""
    final, difference = group["quality"]["final"] or {}, group["quality"]["difference"] or {}
    training, speed, label = group["recipe"]["training"], group["speed"], group["label"]
    outcome = "" if group["baseline"] else group["statements"][0]["outcome"]
    return Row(
        label,
        label in CONTROLS,
        group["baseline"],
        "best control" if group["baseline"] else OUTCOMES.get(outcome, outcome),
        final.get("mean"),
        final.get("sd"),
        final.get("n", 0),
        0.0 if group["baseline"] else difference.get("mean"),
        difference.get("family_low"),
        difference.get("family_high"),
        training["per_device_train_batch_size"],
        training["learning_rate"],
        training["max_steps"],
        1.0 if group["baseline"] else (speed.get("cost", speed.get("spent_ratio")) or {}).get("mean"),
        1.0 if group["baseline"] else (speed["seconds_ratio"] or {}).get("mean"),
        "" if group["baseline"] else find_reach(comparison, label, training["max_steps"]),
        worth.get(label, {}),
        json.dumps(study["arms"].get(label, {})),
        say(group["statements"]),
        tuple(run for run in comparison["runs"] if run["group"] == group["group"] and run["counts"]),
        best=comparison["groups"][0]["label"],
    )


def say(statements: Sequence[dict[str, Any]]) -> str:
    """Say of a comparison's statements what is of the losses, in its own words."""
    from sparsebp_cli.compare.statement import Number, Statement
    from sparsebp_cli.compare.words import say_all

    said = [
        Statement(one["outcome"], one["subject"], tuple(Number(**n) for n in one["numbers"]), tuple(one["reasons"]))
        for one in statements
        if one["subject"] in SAID
    ]
    return say_all(said) if said else ""


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
