"""Runs a study and its controls of equal cost, and writes its report, for `make results`.

    python benchmarks/study.py recipes/study --baseline dense --controls tokens-random --out docs/results/study

It runs every recipe of the folder with three seeds, one run after the other. Then it runs the dense controls that
`compare` reports as missing: their steps and batches cost as much on this machine.
Last it writes the report as page, text and JSON. Runs are kept in a folder of their own (below build/results, or
$SPARSEBP_HOME), and finished ones are not repeated, so an interrupted study continues.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

from thin import list_runs  # noqa: E402

EQUAL_COST = ("fewer_steps", "smaller_batch", "fewer_examples", "own_learning_rate")
SPARSEBP = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()"]


def main() -> None:
    """Run what is missing, then compare."""
    arguments = read_arguments()
    os.environ.setdefault("SPARSEBP_HOME", str(ROOT / "build" / "results" / arguments.recipes.name))
    for file in sorted(arguments.recipes.glob("*.yaml")):
        if missing := find_missing(file, arguments.seeds, arguments.set):
            changes = [word for change in arguments.set for word in ("--set", change)]
            call("run", str(file), "--seeds", ",".join(map(str, missing)), *changes)
    for label in arguments.controls:  # in order: a control of the first may also serve the second
        for control in compare(arguments, "-o", "json", is_read=True)["controls"]:
            if control["label"] == label and control["kind"] in arguments.kinds and control["runs"]:
                call(*make_words(control["runs"]))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    found = compare(arguments, "-o", "json", "--html", str(arguments.out.with_suffix(".html")), is_read=True)
    arguments.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    list_runs(arguments.out.with_suffix(".json"), arguments.out.with_suffix(".csv"))
    arguments.out.with_suffix(".txt").write_text(compare(arguments), encoding="utf-8")


def make_words(runs: dict[str, Any]) -> list[str]:
    """Return the command that makes a control, in words, from its runs as the comparison's JSON has them."""
    changes = [word for change in runs["changes"] for word in ("--set", change)]
    seeds = ["--seeds", ",".join(map(str, runs["seeds"]))] if runs["seeds"] else []
    return ["run", "--like", runs["like"], "--name", runs["name"], *changes, *seeds]


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Run a study and its controls, and write its report.")
    parser.add_argument("recipes", type=Path, help="folder of recipes")
    parser.add_argument("--baseline", required=True, help="name of the recipe that the others are held against")
    parser.add_argument("--controls", nargs="*", default=[], help="recipes whose controls of equal cost are made")
    parser.add_argument("--kinds", nargs="*", choices=EQUAL_COST, default=EQUAL_COST, help="which controls those are")
    parser.add_argument("--out", type=Path, required=True, help="where to: .html, .txt, .json and .csv are added")
    parser.add_argument("--margin", default=None, help="how much worse still counts as not worse")
    parser.add_argument("--seeds", default="0-2", help="three or more; fewer allow no statement")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes to every recipe")
    return parser.parse_args()


def find_missing(file: Path, seeds: str, changes: list[str]) -> list[int]:
    """Return the seeds of a recipe that have no finished run."""
    from sparsebp_cli.compare import local_candidates
    from sparsebp_cli.plan import make_plan
    from sparsebp_cli.recipe import load_recipe, parse_seeds

    group = make_plan(load_recipe(file, changes), file).group
    runs = [candidate.loaded for candidate in local_candidates()]
    there = {run.seed for run in runs if run.finished and run.group == group}
    return [seed for seed in parse_seeds(seeds) if seed not in there]


def compare(arguments: argparse.Namespace, *more: str, is_read: bool = False) -> Any:
    """Return the comparison of all runs, as text or read as JSON."""
    from sparsebp_cli.compare import local_candidates

    names = dict.fromkeys(candidate.name for candidate in reversed(local_candidates()))
    margin = ["--margin", arguments.margin] if arguments.margin else []
    text = call("compare", "--all", *names, "--baseline", arguments.baseline, *margin, *more, capture=True)
    return json.loads(text) if is_read else text


def call(*words: str, capture: bool = False) -> str:
    """Call sparsebp; any failure ends the study."""
    if not capture:
        print("sparsebp", shlex.join(words), flush=True)
    done = subprocess.run([*SPARSEBP, *words], check=True, text=True, stdout=subprocess.PIPE if capture else None)
    return done.stdout or ""


if __name__ == "__main__":
    main()
