"""Writes version 0 of the leaderboard, as it was: which method trains a better model than the best dense one?

    python benchmarks/leaderboard_v0.py          # from the values in docs/results/leaderboard; trains nothing

A task is a study, `docs/results/leaderboard/TASK.yaml`; nothing is trained any more, and `leaderboard.py` is version 1.
From their values come `docs/results/leaderboard/v0.csv`, one row a run, and `v0.html` beside it. Every number
and every statement on the page is `sparsebp compare`'s.

The baseline of a task is the best of its dense arms, all of which have the same cost and a learning rate of their own;
it is chosen by the validation metric, and compared on the test split.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import jinja2  # noqa: E402
import yaml  # noqa: E402
from thin import find_archive, has_archive  # noqa: E402

FOLDER = ROOT / "docs" / "results" / "leaderboard"
QUICKSTART = ROOT / "docs" / "results" / "quickstart" / "study.yaml"
PAGE = FOLDER / "v0.html"
DATA = FOLDER / "v0.csv"
SPARSEBP = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()"]
VALIDATION = {"text": "eval/loss", "completion": "eval/loss", "classification": "eval/accuracy"}  # by format
COLUMNS = (
    "task",
    "method",
    "arm",
    "seed",
    "quality",
    "metric",
    "steps",
    "batch",
    "learning_rate",
    "cost",
    "run",
)
STATEMENTS = ("lower", "higher", "no difference shown")  # outcomes that the page counts, even where there is none


@dataclass(frozen=True)
class Task:
    """One study, and its report."""

    name: str
    file: Path
    study: dict[str, Any]
    title: str
    comparison: dict[str, Any]
    later: dict[str, Any] | None = None  # of runs beside other dense rates that were tried after the study

    @property
    def baseline(self) -> dict[str, Any]:
        """The best dense group."""
        group: dict[str, Any] = self.comparison["groups"][0]
        return group


def main() -> None:
    """Write page and data."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tasks = [read_task(file) for file in find_studies() if has_archive(place_of(file))]
    DATA.write_text(write_data(tasks), encoding="utf-8")
    PAGE.write_text(render(tasks), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}, {DATA.relative_to(ROOT)}: {', '.join(task.name for task in tasks) or 'no task'}")


def find_studies() -> list[Path]:
    """Return the files of all tasks: those of the folder, and the study of the quickstart, which has a report of its
    own."""
    return [QUICKSTART, *(file for file in sorted(FOLDER.glob("*.yaml")) if not file.stem.endswith("-base"))]


def place_of(file: Path) -> Path:
    """Return the place of the archive of a study's report, without its ending."""
    return file.parent if file == QUICKSTART else file.with_suffix("")


def name_of(file: Path) -> str:
    """Return the name of a task."""
    return file.parent.name if file == QUICKSTART else file.stem


def read_task(file: Path) -> Task:
    """Return a task with the comparison of its archive."""
    text = file.read_text(encoding="utf-8")
    study = yaml.safe_load(text)
    title, name = text.split("\n", 1)[0].removeprefix("# "), name_of(file)
    rates = ROOT / "docs" / "results" / f"{name}-rates"
    later = compare_with_best(find_archive(rates)) if has_archive(rates) else None
    return Task(name, file, study, title, compare_with_best(find_archive(place_of(file))), later)


def compare_with_best(archive: Path) -> dict[str, Any]:
    """Return the comparison of an archive's runs with the best dense arm among them, by validation."""
    plain = compare(archive, None)
    metric = VALIDATION[plain["groups"][0]["recipe"]["dataset"]["format"]]
    plain = compare(archive, None, "--metric", metric)
    way = -1 if plain["better"] == "higher" else 1
    best = min(find_dense(plain["groups"]), key=lambda group: way * group["quality"]["final"]["mean"])["label"]
    found: dict[str, Any] = compare(archive, best)
    return found


def find_dense(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups in which every parameter is trained by its dense gradient."""
    return [g for g in groups if g["policies"] == ["dense"] and g["recipe"]["model"]["lora"] is None]


def compare(archive: Path, baseline: str | None, *more: str) -> Any:
    """Return the comparison of an archive's runs, of a whole study's those of its report; without a baseline with the
    one that `compare` takes."""
    paths = [*map(PurePosixPath, _members(archive))]
    there = {path.parts[1] for path in paths if path.parts[0] == "runs" and len(path.parts) > 1}
    studies = [path.stem for path in paths if path.parts[0] == "studies"]
    chosen = ["--study", *studies] if studies else sorted(there)
    source = ("--from", str(archive), *(("--baseline", baseline) if baseline else ()))
    return json.loads(call("compare", *chosen, *source, *more, "-o", "json"))


def _members(archive: Path) -> list[str]:
    import tarfile

    with tarfile.open(archive) as file:
        return file.getnames()


def call(*words: str) -> str:
    """Call sparsebp, and return what it prints; any failure ends the script."""
    return subprocess.run([*SPARSEBP, *words], check=True, text=True, stdout=subprocess.PIPE).stdout


def write_data(tasks: list[Task]) -> str:
    """Return the data as CSV, one row a run."""
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for task in tasks:
        groups = {group["group"]: group for group in task.comparison["groups"]}
        for run in sorted(task.comparison["runs"], key=lambda run: (run["label"], run["seed"], run["run_id"])):
            if run["counts"]:
                training = groups[run["group"]]["recipe"]["training"]
                writer.writerow(
                    [
                        task.name,
                        "+".join(groups[run["group"]]["policies"]),
                        run["label"],
                        run["seed"],
                        run["quality"],
                        task.comparison["metric"],
                        run["steps"],
                        training["per_device_train_batch_size"],
                        training["learning_rate"],
                        round(cost_of(task, groups[run["group"]]), 2),
                        run["run_id"],
                    ]
                )
    return out.getvalue()


def cost_of(task: Task, group: dict[str, Any]) -> float:
    """Return what a run of a group costs, in dense steps of the task's own batch; by FLOPs where steps have a price."""
    dense = next(g for g in task.comparison["groups"] if g["label"] == "dense")
    if (spent := flops_of(group)) is not None and (paid := flops_of(dense)) is not None:
        return float(dense["recipe"]["training"]["max_steps"] * spent / paid)
    return float(group["recipe"]["training"]["max_steps"] * units_of(group) / units_of(dense))


def flops_of(group: dict[str, Any]) -> float | None:
    """Return the FLOPs of a run, also of a comparison of schema 4."""
    found: float | None = group["speed"].get("flops", group["speed"].get("spent_flops"))
    return found


def step_cost_of(group: dict[str, Any]) -> float | None:
    """Return what a step costs in dense steps, also of a comparison of schema 4, which has quartiles."""
    found = group["speed"]["step_cost"]
    return found.get("median") if isinstance(found, dict) else found


def units_of(group: dict[str, Any]) -> float:
    """Return what a step of a group costs, in dense forwards and backwards of one example, as a study's budget counts:
    the passes by the probes, and the update by its share of the passes' time in the same runs."""
    speed = group["speed"]
    update = speed["update_share"]
    cost = step_cost_of(group) or 1.0  # passes (1 + update) / (1 + passes update)
    passes = cost / (1.0 + update - cost * update)
    return float(group["recipe"]["training"]["per_device_train_batch_size"] * passes * (1.0 + update))


def make_row(task: Task, group: dict[str, Any]) -> dict[str, Any]:
    """Return what the page shows of one group."""
    final, difference = group["quality"]["final"], group["quality"]["difference"]
    counts, dense = group["cost"], task.baseline["cost"]
    training, base = group["recipe"]["training"], task.baseline["recipe"]["training"]
    batches = training["per_device_train_batch_size"] / base["per_device_train_batch_size"]
    return {
        "arm": group["label"],
        "is_baseline": group["baseline"],
        "options": json.dumps(task.study["arms"].get(group["label"], {})),
        "quality": final,
        "difference": difference,
        "statement": "best dense" if group["baseline"] else group["statements"][0]["outcome"],
        "steps": training["max_steps"],
        "batch": training["per_device_train_batch_size"],
        "rate": training["learning_rate"],
        "step_cost": step_cost_of(group),
        "cost": cost_of(task, group),
        "saved": _ratio(counts["saved_bytes"], (dense["saved_bytes"] or 0.0) * batches),
        "cosine": counts["cosine"],
        "noise": counts["noise_ratio"],
        "verdict": group["verdict"],
        "command": make_command(task, group),
        "runs": [run["run_id"] for run in task.comparison["runs"] if run["group"] == group["group"] and run["counts"]],
    }


def describe_later(task: Task) -> list[str]:
    """Say what dense rates that were tried after the study change."""
    assert task.later is not None
    best, *others = task.later["groups"]
    training = best["recipe"]["training"]
    batch, rate = training["per_device_train_batch_size"], training["learning_rate"]
    mine, best_of_study = (one["quality"]["final"]["mean"] for one in (best, task.baseline))
    lines = [
        f"dense with a batch of {batch} and a rate of {rate:g} has {mine:.4f}, where the best dense arm of the study "
        f"has {best_of_study:.4f}"
    ]
    for group in others:
        statement = group["statements"][0]
        if group["policies"] != ["dense"] and statement["numbers"]:
            number = statement["numbers"][0]
            lines.append(
                f"{group['label']} beside it: {statement['outcome']}, {number['value']:+.4f} "
                f"[{number['low']:+.3f}, {number['high']:+.3f}]"
            )
    return lines


def make_command(task: Task, group: dict[str, Any]) -> str:
    """Return the command that trains a group again, with its steps and learning rate."""
    training = group["recipe"]["training"]
    own = dict(task.study["arms"].get(group["label"]) or {})
    if group["label"] not in task.study["arms"]:  # a control that compare asked for
        own["policy"] = [
            {key: value for key, value in policy.items() if value is not None} for policy in group["recipe"]["policy"]
        ]
    keys = ("max_steps", "warmup_steps", "learning_rate", "per_device_train_batch_size")
    own |= {f"training.{key}": training[key] for key in keys}
    changes = [word for key, value in own.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    base = (task.file.parent / task.study["base"]).relative_to(ROOT)
    seeds = ",".join(map(str, group["seeds"]))
    return shlex.join(["sparsebp", "run", str(base), "--name", group["label"], *changes, "--seeds", seeds])


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if not value or not base else value / base


def render(tasks: list[Task]) -> str:
    """Return the page."""
    from markupsafe import Markup

    loader = jinja2.ChoiceLoader(
        [jinja2.FileSystemLoader(Path(__file__).parent / "page"), jinja2.PackageLoader("sparsebp_cli.page", "")]
    )
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["embed"] = lambda name: Markup(loader.get_source(environment, name)[0])
    shown = []
    for task in tasks:
        rows = [make_row(task, group) for group in task.comparison["groups"]]
        way = -1 if task.comparison["better"] == "higher" else 1
        rows.sort(key=lambda row: way * (row["difference"] or {"mean": 0.0})["mean"])
        words = dict.fromkeys([*STATEMENTS, *(row["statement"] for row in rows if not row["is_baseline"])])
        counts = {word: [row["arm"] for row in rows if row["statement"] == word] for word in words}
        known = {row["arm"] for row in rows}
        missing = [arm for arm in task.study["arms"] if arm not in known]
        rates = sorted({row["rate"] for row in rows})
        good = {"lower": "lower", "higher": "higher"}[task.comparison["better"]]
        paths = {"study": task.file.relative_to(ROOT), "archive": f"{place_of(task.file).relative_to(ROOT)}.tar.gz"}
        is_priced = all(flops_of(group) is not None for group in task.comparison["groups"])
        shown.append(
            {"task": task, "rows": rows, "counts": counts, "missing": missing, "rates": rates, "good": good, **paths}
            | {"later": None if task.later is None else describe_later(task), "is_priced": is_priced}
        )
    waiting = [name_of(file) for file in find_studies() if not has_archive(place_of(file))]
    return environment.get_template("page.html").render(shown=shown, waiting=waiting) + "\n"


if __name__ == "__main__":
    main()
