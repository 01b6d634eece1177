"""Measures the verbs that read many runs: CPU seconds of `runs`, `show` and `compare` without their imports.

    python benchmarks/stores.py                      # 2,000 run folders, and 300 to compare
    python benchmarks/stores.py --home /tmp/stores   # keeps the runs there: measure another checkout on the same
    python benchmarks/stores.py --runs 20 --compared 9 --steps 20   # the same code in seconds

Every run has 200 steps with 24 metrics and ten evaluations, as training leaves them; 60 groups of seeds, or fewer. CPU
seconds are those of the process and its children, so another program on the machine changes little.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, os.environ.get("SPARSEBP_CHECKOUT", str(ROOT)))

from sparsebp_cli.plan import Plan  # noqa: E402 - the path is set above
from sparsebp_cli.recipe import Recipe  # noqa: E402

BORN = 1_700_000_000.0
STEP_METRICS = {
    "train/loss": 4.0,
    "train/grad_norm": 1.0,
    "train/learning_rate": 1e-3,
    "train/tokens": 1024.0,
    "policy/kept_share": 0.5,
    "time/step_seconds": 0.2,
    "time/forward_seconds": 0.06,
    "time/backward_seconds": 0.12,
    "time/optimizer_seconds": 0.02,
    "throughput/tokens_per_sec": 5000.0,
    "memory/peak_resident_bytes": 1.2e9,
    "memory/weight_bytes": 1e8,
    "memory/gradient_bytes": 1e8,
    "memory/optimizer_bytes": 2e8,
    **{f"layer/{number}": 0.5 for number in range(10)},
}
COMMAND = "from sparsebp_cli.cli.app import main; main()"


def make_plan(number: int, groups: int, steps: int) -> Plan:
    """Make the plan of one run of a study: groups differ in their learning rate, the first is dense."""
    group, seed = number % groups, number // groups
    policy = [{"name": "topk", "keep": 0.1, "along": "rows"}] if group else [{"name": "dense"}]
    training = {"max_steps": steps, "seed": seed, "learning_rate": 1e-3 * (1 + group)}
    recipe = {"version": 1, "name": f"group-{group}", "model": {"name": "m"}, "dataset": {"name": "d"}}
    whole = Recipe.model_validate(recipe | {"policy": policy, "training": training})
    return Plan(recipe=whole, created=BORN + 1000.0 * number)


def make_journal(plan: Plan, steps: int) -> list[dict[str, object]]:
    """Make the records that a worker writes."""
    noise = random.Random(plan.run_id)
    environment = {"python": "3.12", "cpu": "a cpu", "cores": 2, "packages": {"torch": "2.13"}}
    policies = [{"name": entry.name, "exact": entry.name == "dense"} for entry in plan.recipe.policy]
    facts = {"max_steps": steps, "warmup_steps": 3, "dataset_digest": "abc", "policies": policies}
    records: list[dict[str, object]] = [
        {"kind": "attempt", "from_step": 0, "environment": environment},
        {"kind": "facts", "values": facts},
    ]
    for step in range(1, steps + 1):
        values = {name: value * (1 + 0.02 * noise.random()) for name, value in STEP_METRICS.items()}
        if step % max(1, steps // 10) == 0:
            values |= {"eval/loss": 3.0 + 1.0 / step + 0.01 * noise.random(), "fidelity/cosine": 0.9}
        records.append({"kind": "metrics", "step": step, "values": values})
    records.append({"kind": "end", "status": "finished", "step": steps, "text": ""})
    return [record | {"attempt": 1, "time": plan.created + 0.2 * place} for place, record in enumerate(records)]


def write_folders(home: Path, runs: int, groups: int, steps: int) -> None:
    """Write run folders as a worker leaves them."""
    for number in range(runs):
        plan = make_plan(number, groups, steps)
        folder = home / "runs" / plan.run_id
        folder.mkdir(parents=True)
        plan.save(folder)
        lines = "".join(json.dumps(record) + "\n" for record in make_journal(plan, steps))
        (folder / "journal.jsonl").write_text(lines, encoding="utf-8")


def cpu_seconds(home: Path, words: Sequence[str]) -> float:
    """Return the CPU seconds of one verb."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"SPARSEBP_HOME": str(home), "PYTHONPATH": sys.path[0], "COLUMNS": "160"}
    command = [sys.executable, "-c", COMMAND, *words]
    done = subprocess.run(command, env=environment, cwd=sys.path[0], capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"sparsebp {' '.join(words)} ended with {done.returncode}: {done.stderr.decode()[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Write the runs, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=2000, help="run folders")
    parser.add_argument("--compared", type=int, default=300, help="runs that are compared")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--home", type=Path, help="keep the runs here; those that are there are used again")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    options = parser.parse_args()
    home = options.home or Path(tempfile.mkdtemp(prefix="sparsebp-stores-"))
    groups = max(1, min(60, options.compared // 5))
    try:
        if not (home / "many").is_dir():
            write_folders(home / "many", options.runs, groups, options.steps)
            write_folders(home / "some", options.compared, groups, options.steps)
            write_folders(home / "one", 1, 1, options.steps)
        report(home, options)
    finally:
        if options.home is None:
            shutil.rmtree(home)


def report(home: Path, options: argparse.Namespace) -> None:
    """Measure every verb twice, the second time with the caches of the first, against the verb with one run."""
    everything = ["compare", "--where", "seed>=0", "-o", "json"]
    listed = str(options.runs)
    verbs = {
        f"runs (the newest 20 of {listed})": ("many", ["runs"], ["runs"]),
        f"runs --limit {listed}": ("many", ["runs", "--limit", listed, "-o", "json"], ["runs", "-o", "json"]),
        f"show (one of {listed})": ("many", ["show", "@last"], ["show", "@last"]),
        f"compare {options.compared} folders": ("some", everything, everything),
    }
    found = {}
    for name, (where, words, alone) in verbs.items():
        base = min(cpu_seconds(home / "one", alone) for _ in range(2))
        times = [cpu_seconds(home / where, words) for _ in range(2)]
        found[name] = {"first": times[0], "again": times[1], "with_one_run": base}
        print(f"{name:36}  {times[0] - base:7.2f} s, again {times[1] - base:7.2f} s  (with one run {base:.2f} s)")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
