"""Trains and reports the test at half of dense's price: is an exact method with half of the FLOPs as good?

    python benchmarks/wins.py                    # reports from the archives; trains nothing
    python benchmarks/wins.py --run pronounce    # trains what the study of the task misses, archives and reports

`docs/results/wins/PROTOCOL.md` says what is run and what is decided. Runs are kept below $SPARSEBP_HOME. A task
that is interrupted leaves what it has in `docs/results/wins/parts`, and goes on from there with the same code. When it
is whole, `make fix` writes the table of `docs/results/wins.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from statistics import fmean
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

from brought import SPARSEBP, fetch, put_back  # noqa: E402

RESULTS = ROOT / "docs" / "results"
FOLDER = RESULTS / "wins"
TASKS = ("pronounce", "genre")
DENSE = ("dense", "dense-by-length")  # the better of them, by validation, is the best dense
MARGIN = 0.02  # nats of test loss


def run_task(task: str) -> None:
    """Train what a task's study misses, and archive its trials: those that are there if it is interrupted."""
    from sparsebp_cli.run import home

    fetch(FOLDER / f"{task}.yaml", _environment())
    whole, part = FOLDER / f"{task}.tar.gz", FOLDER / "parts" / f"{task}.tar.gz"
    for archive in (whole, part):
        put_back(archive, home())
    code = 1
    try:
        study = [*SPARSEBP, "study", str(FOLDER / f"{task}-study.yaml")]
        code = subprocess.run(study, env=_environment(), check=False).returncode
    finally:  # also after Ctrl-C
        place = whole if code == 0 else part
        place.parent.mkdir(exist_ok=True)
        archive_words = [*SPARSEBP, "archive", f"@wins-{task}", "--to", str(place)]
        subprocess.run(archive_words, env=_environment(), check=code == 0)  # a study that never began has nothing
    if code:
        sys.exit(code)
    part.unlink(missing_ok=True)


def compare(task: str, baseline: str, *form: str) -> str:
    """Return the comparison of a task's report against one of its arms, from the archive alone."""
    words = ["compare", "--study", f"wins-{task}", "--from", str(FOLDER / f"{task}.tar.gz"), "--baseline", baseline]
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [*SPARSEBP, *words, "--metric", "test/loss", "--margin", str(MARGIN), *form],
            env=_environment() | {"SPARSEBP_HOME": home, "COLUMNS": "100"},
            capture_output=True,
            text=True,
            check=True,
        )
    return done.stdout


def find_best_dense(comparison: dict[str, Any]) -> str:
    """Return the dense arm with the lowest validation loss after its last step, mean over the seeds."""
    means = {
        arm: fmean(run["curves"]["eval/loss"][-1][1] for run in comparison["runs"] if run["label"] == arm)
        for arm in DENSE
    }
    return min(means, key=lambda arm: means[arm])


def report(task: str) -> dict[str, str]:
    """Return the reports of a task by file name: JSON for the page and the tests, text to read."""
    best = find_best_dense(json.loads(compare(task, "dense", "-o", "json")))
    return {
        f"wins-{task}.json": compare(task, best, "-o", "json"),
        f"wins-{task}.txt": compare(task, best),
    }


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=TASKS, action="append", default=[], help="a task to train first")
    for task in parser.parse_args().run:
        run_task(task)
    for task in TASKS:
        if not (FOLDER / f"{task}.tar.gz").exists():
            print(f"{task}: not trained")
            continue
        for name, text in report(task).items():
            (RESULTS / name).write_text(text, encoding="utf-8")
            print(f"wrote docs/results/{name}")


if __name__ == "__main__":
    main()
