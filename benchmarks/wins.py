"""Trains and reports the test at half of dense's price: is an exact method with half of the FLOPs as good?

    python benchmarks/wins.py                    # reports from the values; trains nothing
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
from thin import KEPT, find_archive, has_archive, thin  # noqa: E402

RESULTS = ROOT / "docs" / "results"
FOLDER = RESULTS / "wins"
TASKS = ("pronounce", "genre")
DENSE = ("dense", "dense-by-length")  # the better of them, by validation, is the best dense
MARGIN = 0.02  # nats of test loss
LEFT_OUT = {
    "groups": ("layers",),
    "runs": ("environment", "samples"),
}  # of a report: neither page nor test reads it


def run_task(task: str) -> None:
    """Train what a task's study misses, and archive its trials: those that are there if it is interrupted."""
    from sparsebp_cli.run import home

    fetch(FOLDER / f"{task}.yaml", _environment())
    whole, part = FOLDER / f"{task}.tar.gz", FOLDER / "parts" / f"{task}.tar.gz"
    for archive in (find_archive(FOLDER / task), part):
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
    thin(whole, FOLDER / f"{task}.parquet", KEPT["report"])
    part.unlink(missing_ok=True)


def compare(task: str, baseline: str, *form: str) -> str:
    """Return the comparison of a task's report against one of its arms, from its values alone."""
    words = ["compare", "--all", "--study", f"wins-{task}", "--from", str(find_archive(FOLDER / task))]
    words += ["--baseline", baseline]
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
    """Return the reports of a task by file name: JSON for the page and the tests, text to read, steps by batch."""
    best = find_best_dense(json.loads(compare(task, "dense", "-o", "json")))
    return {
        f"wins-{task}.json": shorten(compare(task, best, "-o", "json")),
        f"wins-{task}.txt": compare(task, best),
        f"wins-{task}-steps.json": json.dumps(find_steps_by_batch(task), indent=1) + "\n",
    }


def shorten(comparison: str) -> str:
    """Return a comparison without what its page does not read, and without the null keys of its recipes, so that a
    new key of recipes, which is null there, changes no report."""
    found = json.loads(comparison)
    for part, names in LEFT_OUT.items():
        found[part] = [{key: value for key, value in one.items() if key not in names} for one in found[part]]
    for group in found["groups"]:
        group["recipe"] = _leave_out_nulls(group["recipe"])
    return json.dumps(found, indent=1) + "\n"


def _leave_out_nulls(section: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _leave_out_nulls(value) if isinstance(value, dict) else value
        for key, value in section.items()
        if value is not None
    }


def find_steps_by_batch(task: str) -> list[dict[str, float]]:
    """Return, for each batch of a task's grid, what its rehearsals say: the steps that all of the budget pays
    of `dense`, those that half of it pays of `lossless`, and dense's lowest validation loss of the tuning."""
    from sparsebp_cli.compare.archive import open_archive
    from sparsebp_lab.study.budget import find_steps, make_rehearsals
    from sparsebp_lab.study.extension import plan_extended
    from sparsebp_lab.study.loader import load_study
    from sparsebp_lab.study.record import find_archived
    from sparsebp_lab.study.store import TrialStore
    from sparsebp_lab.study.trial import TrialMaker

    folder = open_archive(find_archive(FOLDER / task))
    loaded = load_study(FOLDER / f"{task}-study.yaml")
    maker = TrialMaker(loaded.study.study, loaded.folders, find_archived(loaded.study.study, folder).generation)
    store = TrialStore(maker, folder)
    loaded, course, _ = plan_extended(loaded, maker, store)
    rows: dict[int, dict[str, float]] = {}
    for position, steps in find_steps(loaded, make_rehearsals(loaded, maker, store), store).items():
        variant = loaded.variants[position]
        batch = variant.recipe.training.per_device_train_batch_size
        rows.setdefault(batch, {"batch": batch})[variant.arm] = steps
    for one in course.tuned:
        if one.value is not None:
            row = rows[one.variant.recipe.training.per_device_train_batch_size]
            row["validation"] = min(one.value, row.get("validation", one.value))
    return [rows[batch] for batch in sorted(rows)]


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=TASKS, action="append", default=[], help="a task to train first")
    for task in parser.parse_args().run:
        run_task(task)
    for task in TASKS:
        if not has_archive(FOLDER / task):
            print(f"{task}: not trained")
            continue
        for name, text in report(task).items():
            (RESULTS / name).write_text(text, encoding="utf-8")
            print(f"wrote docs/results/{name}")


if __name__ == "__main__":
    main()
