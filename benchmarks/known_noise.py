"""Measures with `worth` what is known: examples drawn with a share of one half have noise 1 and bias 0.

    python benchmarks/known_noise.py    # twenty tasks, ten minutes on one core; benchmarks/results/known-noise.json

A task is text of one package of Python's standard library, in blocks of equal length, so that each example weighs the
same. Lengths, batches, learning rates, steps and optimizers differ between tasks. An interval of 95 % misses one in
twenty on average.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
PACKAGES = (
    *("asyncio", "collections", "concurrent", "ctypes", "email", "encodings", "html", "http", "idlelib"),
    *(
        "importlib",
        "json",
        "logging",
        "multiprocessing",
        "re",
        "tkinter",
        "unittest",
        "urllib",
        "wsgiref",
        "xml",
        "xmlrpc",
    ),
)
RESULT = ROOT / "benchmarks" / "results" / "known-noise.json"
MOST, LEAST = 400_000, 30_000  # characters of a task


def make_tasks(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a recipe for each package."""
    for number, package in enumerate(PACKAGES):
        files = sorted((LIBRARY / package).rglob("*.py"))
        text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)[:MOST]
        assert len(text) >= LEAST, package
        (folder / f"{package}.txt").write_text(text, encoding="utf-8")
        data = {"name": str(folder / f"{package}.txt"), "format": "text", "max_seq_length": (32, 64, 128)[number % 3]}
        training = {
            "max_steps": 30 + 10 * (number % 4),
            "learning_rate": (1e-3, 3e-4, 3e-3)[number % 3],
            "per_device_train_batch_size": (4, 8, 16)[number // 3 % 3],
            "optim": "sgd" if number % 7 == 6 else "adamw",
        }
        yield {
            "version": 1,
            "name": package,
            "model": {"name": "austen-llama"},
            "dataset": data,
            "policy": [{"name": "uniform", "keep": 0.5}],
            "training": training,
            "measure": {"eval_examples": 4, "probe_every": None},
            "target": {"threads": 1, "device": "cpu"},
        }


def measure_task(values: dict[str, Any]) -> dict[str, Any]:
    """Return noise and bias of the policy of a recipe, each with its interval."""
    from sparsebp_cli.plan import Plan
    from sparsebp_cli.recipe.schema import Recipe
    from sparsebp_cli.run import JournalWriter, create_run
    from sparsebp_cli.worker.ending import StopRequest
    from sparsebp_cli.worker.training import Training
    from sparsebp_lab.worth.measure import measure

    plan = Plan(recipe=Recipe.model_validate(values))
    run = create_run(plan.run_id)
    plan.save(run.path)
    with JournalWriter(run.path, durable=False) as journal:
        training = Training.build(Plan.load(run.plan_file), run, journal, StopRequest())
        found: Any = measure(training, all_policies=False, report=lambda *_: None)
    policy = found["policies"][0]
    return {"task": values["name"], "noise": policy["noise"], "bias": policy["bias"]}


def main() -> None:
    """Measure each task, print and write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from tests.trials import find_commit

    tasks = []
    with tempfile.TemporaryDirectory() as name:
        os.environ["SPARSEBP_HOME"] = str(Path(name) / "home")
        for values in make_tasks(Path(name)):
            tasks.append(one := measure_task(values))
            found = ((key, one[key]) for key in ("noise", "bias"))
            shown = (f"{key} {v['value']:.2f} [{v['low']:.2f}, {v['high']:.2f}]" for key, v in found)
            print(f"{one['task']:16}", *shown, flush=True)
    right = {
        key: sum(one[key]["low"] <= truth <= one[key]["high"] for one in tasks)
        for key, truth in (("noise", 1.0), ("bias", 0.0))
    }
    print(f"of {len(tasks)} intervals, {right['noise']} hold the noise and {right['bias']} the bias")
    record = {"date": datetime.now(UTC).date().isoformat(), "commit": find_commit(), "right": right, "tasks": tasks}
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
