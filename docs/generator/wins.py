"""The table of the test at half of dense's price, from the comparisons that benchmarks/wins.py wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generator.markdown import table
from sparsebp_cli.compare.statistics import paired_difference

PAGE = "docs/results/wins.md"
PLACE = re.compile(r"(<!-- wins -->\n).*?(<!-- end of wins -->)", re.DOTALL)
STEPS = re.compile(r"(<!-- steps -->\n).*?(<!-- end of steps -->)", re.DOTALL)
TASKS = ("pronounce", "genre")
ARM = "lossless"
COLUMNS = (
    "task",
    "best dense",
    "its test loss",
    "`lossless`, steps",
    "its test loss",
    "difference",
    "beside dense in the same order",
    "FLOPs over dense's",
    "CPU seconds over dense's",
    "a step over dense's of the same batch",
    "not worse by 0.02",
)
STEP_COLUMNS = (
    "task",
    "batch",
    "dense, all of the FLOPs",
    "dense by length, all",
    "`lossless`, half of them",
    "dense's lowest validation loss, tuning",
)


def page(root: Path) -> str:
    """Return the page with a row for each task whose comparison is there, and one for each of its batches."""
    text = (root / PAGE).read_text(encoding="utf-8")
    files = {task: root / "docs" / "results" / f"wins-{task}.json" for task in TASKS}
    rows = [show(task, json.loads(file.read_text(encoding="utf-8"))) for task, file in files.items() if file.exists()]
    missing = [f"*{task}*" for task, file in files.items() if not file.exists()]
    under = f"\nRegistered, without a report yet: {', '.join(missing)}.\n" if missing else ""
    filled = (table(COLUMNS, rows) if rows else "") + under
    text = PLACE.sub(lambda match: f"{match[1]}{filled}{match[2]}", text)
    batches = [row for task in TASKS for row in show_batches(task, root)]
    return STEPS.sub(lambda match: f"{match[1]}{table(STEP_COLUMNS, batches)}{match[2]}", text)


def show_batches(task: str, root: Path) -> list[list[str]]:
    """Return a row for each batch of a task's grid; none where the task has no report."""
    file = root / "docs" / "results" / f"wins-{task}-steps.json"
    if not file.exists():
        return []
    arms = ("dense", "dense-by-length", ARM)
    return [
        [f"*{task}*", f"{row['batch']}", *(f"{row[arm]} steps" for arm in arms), f"{row['validation']:.3f}"]
        for row in json.loads(file.read_text(encoding="utf-8"))
    ]


def show(task: str, comparison: dict[str, Any]) -> list[str]:
    """Return the row of a task."""
    groups = {group["label"]: group for group in comparison["groups"]}
    best = next(group for group in groups.values() if group["baseline"])
    own, training = groups[ARM], best["recipe"]["training"]
    steps, batch, rate = (training[key] for key in ("max_steps", "per_device_train_batch_size", "learning_rate"))
    dense = f"{steps} steps of {batch}, rate {rate:g}" + (", by length" if training.get("group_by") == "length" else "")
    gap, quality = own["quality"]["difference"], own["quality"]
    return [
        f"*{task}*",
        dense,
        _mean(best["quality"]["final"]),
        f"{own['recipe']['training']['max_steps']}",
        _mean(quality["final"]),
        f"{gap['mean']:+.3f} ({gap['family_low']:+.3f} to {gap['family_high']:+.3f})",
        _same_order(comparison["runs"]),
        _ratio(own["speed"].get("cost", own["speed"].get("spent_ratio"))),
        _ratio(own["speed"]["seconds_ratio"]),
        f"{own['speed'].get('step_price', own['speed'].get('step_cost')):.2f}",
        quality["not_worse"]["answer"],
    ]


def _same_order(runs: Sequence[dict[str, Any]]) -> str:
    """Return the difference to `dense`, whose batches are those of `lossless`, with a 95 % interval of its own."""
    ours, dense = ({run["seed"]: run["quality"] for run in runs if run["label"] == arm} for arm in (ARM, "dense"))
    found = paired_difference(ours, dense)
    return "-" if found is None else f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def _mean(final: dict[str, float]) -> str:
    return f"{final['mean']:.3f} ± {final['sd']:.3f}"


def _ratio(ratio: dict[str, float] | None) -> str:
    return "-" if ratio is None else f"{ratio['mean']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
