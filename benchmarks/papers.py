"""Trains the small forms of ``recipes/papers`` and writes what came of them to docs/results/papers.json.

    python benchmarks/papers.py            # every study with --scaled, one after another; goes on where it stood
    python benchmarks/papers.py --read     # trains nothing: what is there already

Each study has a home of its own below $SPARSEBP_HOME, by default build/results/papers. `sparsebp fetch minilm-l6
movie-snippets` once, or here by itself. A small form is no reproduction: it says that every arm of the file runs to its
end, and what the comparison says of so few steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

SPARSEBP = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()"]
FETCHED = ("minilm-l6", "movie-snippets")
DATA = ROOT / "docs" / "results" / "papers.json"


def main() -> int:
    """Train what is missing, and write the data; 1 if a study failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", action="store_true", help="train nothing")
    parser.add_argument("--only", default="", help="studies whose name has this word; the others keep their rows")
    args = parser.parse_args()
    homes = Path(os.environ.get("SPARSEBP_HOME") or ROOT / "build" / "results" / "papers").absolute()
    before = json.loads(DATA.read_text(encoding="utf-8"))["studies"] if DATA.exists() else []
    rows, failed = {row["study"]: row for row in before}, 0
    for file in sorted((ROOT / "recipes" / "papers").glob("*.yaml")):
        if args.only not in file.stem:
            continue
        home = homes / file.stem
        if not args.read:
            failed |= train(file, home)
        rows[file.stem] = read(file.stem, home)
        content = {
            "format": 1,
            "command": "python benchmarks/papers.py",
            "studies": [rows[name] for name in sorted(rows)],
        }
        DATA.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


def train(file: Path, home: Path) -> int:
    """Run the small form of a study; return how it ended."""
    if any(name in file.read_text(encoding="utf-8") for name in FETCHED):
        call(["fetch", *FETCHED], home)
    return call(["study", f"papers/{file.stem}", "--scaled"], home).returncode


def read(name: str, home: Path) -> dict[str, Any]:
    """Return what `sparsebp compare` says of a study, arm by arm, without what depends on how busy the machine was."""
    done = call(["compare", "--study", f"{name}-scaled", "-o", "json"], home, quiet=True)
    if done.returncode:
        return {"study": name, "arms": []}
    found = json.loads(done.stdout)
    recipe = found["groups"][0]["recipe"]
    model, training = recipe["model"], recipe["training"]
    return {
        "study": name,
        "model": model["name"] or f"{model['config']['model_type']} of {model['config']['num_hidden_layers']} layers",
        "data": recipe["dataset"]["name"],
        "steps": training["max_steps"],
        "batch": training["per_device_train_batch_size"] * training["gradient_accumulation_steps"],
        "metric": found["metric"],
        "better": found["better"],
        "version": found["runs"][0]["version"],
        "arms": [read_arm(group, found, home) for group in found["groups"]],
    }


def read_arm(group: dict[str, Any], found: dict[str, Any], home: Path) -> dict[str, Any]:
    """Return one arm: its value, its work, the product's verdict."""
    runs = [run for run in found["runs"] if run["group"] == group["group"] and run["state"] == "finished"]
    final = group["quality"]["final"] or {"mean": None, "sd": None}
    return {
        "arm": group["label"],
        "is_baseline": group["baseline"],
        "seeds": sorted(run["seed"] for run in runs),
        "mean": final["mean"],
        "sd": final["sd"],
        "held_bytes": group["cost"]["held_bytes"],
        "flops": group["speed"].get("flops", group["speed"].get("spent_flops")),
        "cpu_seconds": round(sum(cpu_seconds(home / "runs" / run["run_id"]) for run in runs), 1),
        "states": group["states"],
        "verdict": group["verdict"],
    }


def cpu_seconds(run: Path) -> float:
    """Return the CPU seconds of all steps of a run; evaluations, probes and the start are not in them."""
    from sparsebp_cli.run import History, metric

    return sum(History.load(run).series(metric.STEP_CPU_SECONDS.name).values())


def call(words: list[str], home: Path, *, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command of the package with a home."""
    home.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"SPARSEBP_HOME": str(home), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE if quiet else None
    return subprocess.run([*SPARSEBP, *words], env=environment, cwd=ROOT, stdout=pipe, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
