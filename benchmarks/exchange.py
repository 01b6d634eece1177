"""Trains and prints the test of the exchange rate: does a method train like dense with a smaller batch?

    python benchmarks/exchange.py                      # page and data from the archives; trains nothing
    python benchmarks/exchange.py --run spelling       # trains what the task misses, in the protocol's order
    python benchmarks/exchange.py --run spelling --minutes 90
    python benchmarks/exchange.py --measure spelling   # what its methods' measurements miss
    python benchmarks/exchange.py --retrain 3          # cells drawn at random, trained again beside what is archived

`docs/results/exchange/PROTOCOL.md` says what is run and what is compared. Runs are kept below $SPARSEBP_HOME, by
default in build/results/exchange, one folder a task; a task that was interrupted goes on where it stood.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from checkout import ROOT, use_checkout

use_checkout()

import yaml  # noqa: E402

FOLDER = ROOT / "docs" / "results" / "exchange"
from brought import SPARSEBP, fetch, put_back  # noqa: E402
from exchange_page import render  # noqa: E402
from exchange_result import (  # noqa: E402
    MORE_SURFACE_SEEDS,
    SMALL_BATCHES,
    find_rated,
    rated_name,
    read_arms,
    read_task,
)
from exchange_surface import (  # noqa: E402
    BATCH,
    METRIC,
    STEPS,
    SURFACE_SEEDS,
    dense_name,
    find_rate,
    read_losses,
)
from thin import KEPT, digest, find_archive, thin  # noqa: E402

PAGE, DATA = ROOT / "docs" / "results" / "exchange.html", ROOT / "docs" / "results" / "exchange.json"
RATES = (3e-4, 6e-4, 1e-3, 2e-3, 4e-3)
BATCHES = (16, 8, 4, 2, 1, 32)
FIRST_SEEDS, MORE_SEEDS = (100, 101, 102), tuple(range(103, 110))


@dataclass(frozen=True)
class Cell:
    """Some runs that differ in their seed alone."""

    arm: str
    changes: tuple[str, ...]  # of the task's recipe, as --set takes them
    seeds: tuple[int, ...]


class Task:
    """A task's recipe, its runs and what was measured of its methods."""

    def __init__(self, name: str, home: Path | None = None) -> None:
        self.name = name
        self.recipe = FOLDER / f"{name}.yaml"
        self.archive = FOLDER / f"{name}.tar.gz"
        self.worth = FOLDER / f"{name}-worth.json"
        self._seen: set[str] = set()
        self._ended: dict[tuple[str, int], dict[int, float]] = {}
        self.home = home or Path(os.environ.get("SPARSEBP_HOME", ROOT / "build" / "results" / "exchange")) / name

    def prepare(self) -> None:
        """Get what the recipe names and is not here: data and models to fetch, and the model that a recipe beside it
        pretrains (`llama-1m.yaml` is that of `build/results/exchange/llama-1m`)."""
        fetch(self.recipe, self._environment())
        model = yaml.safe_load(self.recipe.read_text(encoding="utf-8"))["model"]["name"]
        pretraining = FOLDER / f"{Path(model).name}.yaml"
        if pretraining.exists() and not (self.recipe.parent / model).exists():
            fetch(pretraining, self._environment())
            subprocess.run([*SPARSEBP, "run", str(pretraining)], env=self._environment(), check=True)
            words = [*SPARSEBP, "model", pretraining.stem, "--to", str(self.recipe.parent / model)]
            subprocess.run(words, env=self._environment(), check=True)

    def train(self, cell: Cell) -> None:
        """Train the seeds of a cell that are not there."""
        if missing := [seed for seed in cell.seeds if seed not in self.losses(cell)]:
            changes = [word for change in cell.changes for word in ("--set", change)]
            seeds = ["--seeds", ",".join(map(str, missing))]
            words = [*SPARSEBP, "run", str(self.recipe), "--name", cell.arm, *changes, *seeds]
            # A run that diverges ends with an error, and is a result like any other.
            subprocess.run(words, env=self._environment(), check=False, stdout=subprocess.DEVNULL)
            for model in (self.home / "runs").glob("*/model"):
                shutil.rmtree(model)  # 15 MB a run, which nobody reads

    def losses(self, cell: Cell) -> dict[int, dict[int, float]]:
        """Return the validation losses of a cell's runs by seed and step."""
        from sparsebp_cli.plan import make_plan
        from sparsebp_cli.recipe import load_recipe

        group = make_plan(load_recipe(self.recipe, list(cell.changes)), self.recipe).group
        return {seed: losses for (found, seed), losses in self._read().items() if found == group}

    def _read(self) -> dict[tuple[str, int], dict[int, float]]:
        """Return the losses of all runs that came to an end, by group and seed."""
        from sparsebp_cli.compare.load import load_folder
        from sparsebp_cli.run import RunFolder

        for plan in (self.home / "runs").glob("*/plan.json"):
            if plan.parent.name in self._seen:
                continue
            run = load_folder(RunFolder(plan.parent))
            if run.seed is not None and (run.finished or run.broke_down):
                self._seen.add(plan.parent.name)  # what ended stays as it is, and takes a tenth of a second to read
                self._ended[run.group, run.seed] = dict(run.series(METRIC)) if run.finished else {}
        return self._ended

    def measure(self, rate: float) -> None:
        """Measure noise, bias and price of every arm that has none yet. What was measured before there was a noise by
        curvature, or a share of the rate, stays, and what an unbiased arm lacks is added."""
        known: dict[str, Any] = json.loads(self.worth.read_text(encoding="utf-8")) if self.worth.exists() else {}
        arms = read_arms(FOLDER, self.name)
        for arm, change in read_methods(self.name).items():
            before = known.get(arm, {})
            is_whole = "noise_curved" in before and ("rate" in before or not arms[arm]["unbiased"])
            if "refused" in before or is_whole:
                continue
            changes = ["--set", change, "--set", f"training.learning_rate={rate}"]
            words = [*SPARSEBP, "worth", str(self.recipe), *changes, "-o", "json"]
            done = subprocess.run(words, env=self._environment(), capture_output=True, text=True, check=False)
            if done.returncode:
                known[arm] = {"refused": done.stderr.strip().splitlines()[-1]}
            else:
                policies = json.loads(done.stdout)["policies"]
                [found] = [policy for policy in policies if policy["name"] != "dense"]
                known[arm] = {key: value for key, value in found.items() if key != "by_part"} | before
            self.worth.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print(f"{self.name}: measured {arm}", flush=True)

    def read_archive(self) -> None:
        """Put the runs of the task's archive beside those that are here."""
        put_back(find_archive(FOLDER / self.name), self.home)

    def write_archive(self) -> None:
        """Write all runs that ended into the task's archive, and their values beside it."""
        from sparsebp_cli.compare.load import load_folder
        from sparsebp_cli.run import RunFolder

        found = [load_folder(RunFolder(plan.parent)) for plan in (self.home / "runs").glob("*/plan.json")]
        runs = sorted(run.run_id for run in found if run.finished or run.broke_down)
        subprocess.run([*SPARSEBP, "archive", *runs, "--to", str(self.archive)], env=self._environment(), check=True)
        thin(self.archive, FOLDER / f"{self.name}.parquet", KEPT["losses"])

    def _environment(self) -> dict[str, str]:
        return os.environ | {"SPARSEBP_HOME": str(self.home), "OMP_NUM_THREADS": "1"}


def read_methods(task: str) -> dict[str, str]:
    """Return what each arm of a task changes in its recipe, unbiased arms first."""
    arms = read_arms(FOLDER, task)
    ordered = sorted(arms, key=lambda arm: not arms[arm]["unbiased"])  # otherwise in the order of the file
    return {arm: f"policy={json.dumps(arms[arm]['policy'])}" for arm in ordered}


def make_dense(batch: int, rate: float, seeds: Sequence[int]) -> Cell:
    """Return a cell of dense's surface."""
    changes = (f"training.per_device_train_batch_size={batch}", f"training.learning_rate={rate}")
    return Cell(dense_name(batch, rate), changes, tuple(seeds))


def choose_rate(task: Task) -> float:
    """Return the rate of a task; the grid is extended as long as its best rate is at an edge."""
    rates = [*RATES]
    while True:
        cells = {rate: make_dense(BATCH, rate, SURFACE_SEEDS) for rate in rates}
        for cell in cells.values():
            task.train(cell)
        # A run that diverged has no loss, and its rate is not chosen.
        means = {
            rate: fmean(losses.get(STEPS, float("inf")) for losses in task.losses(cell).values())
            for rate, cell in cells.items()
        }
        best = min(means, key=lambda rate: means[rate])
        if best == min(rates):
            rates.insert(0, best / 2)
        elif best == max(rates):
            rates.append(best * 2)
        else:
            return best


def list_cells(task: Task, rate: float) -> Iterator[Cell]:
    """Yield the cells of steps 4 to 6 of the protocol; what decides the hypotheses on unbiased arms comes first."""
    arms, methods = read_arms(FOLDER, task.name), read_methods(task.name)
    changed = {arm: (change, f"training.learning_rate={rate}") for arm, change in methods.items()}
    unbiased = [arm for arm in methods if arms[arm]["unbiased"]]
    yield make_dense(BATCH, rate, FIRST_SEEDS)
    for batch in SMALL_BATCHES:
        yield make_dense(batch, rate, MORE_SURFACE_SEEDS)
    for arm in unbiased:
        yield Cell(arm, changed[arm], FIRST_SEEDS)
    # H7 reads its predictions there, also of a task whose rate is the lowest of the grid.
    below = [other for other in RATES if other < rate] or [rate / 4, rate / 2]
    for other in reversed(below):
        for batch in SMALL_BATCHES[::-1]:
            yield make_dense(batch, other, SURFACE_SEEDS)
    worth = json.loads(task.worth.read_text(encoding="utf-8"))
    for arm, own in find_rated(worth, unbiased, rate).items():
        yield Cell(rated_name(arm), (methods[arm], f"training.learning_rate={own}"), FIRST_SEEDS)
    for arm in [arm for arm in methods if arm not in unbiased]:
        yield Cell(arm, changed[arm], FIRST_SEEDS)
    for other in RATES:
        if other > rate:
            for batch in SMALL_BATCHES[::-1]:
                yield make_dense(batch, other, SURFACE_SEEDS)
    for seed in MORE_SEEDS:
        yield make_dense(BATCH, rate, [seed])
        for arm, changes in changed.items():
            yield Cell(arm, changes, (seed,))


def run(task: Task, minutes: float) -> None:
    """Train what a task misses, in the order of the protocol, and archive it."""
    end = time.monotonic() + 60 * minutes
    task.read_archive()
    task.prepare()
    try:
        rate = choose_rate(task)
        print(f"{task.name}: rate {rate:g}", flush=True)
        for batch in BATCHES[1:]:
            task.train(make_dense(batch, rate, SURFACE_SEEDS))
        task.measure(rate)
        for cell in list_cells(task, rate):
            if time.monotonic() > end:
                break
            task.train(cell)
            print(f"{task.name}: {cell.arm} {','.join(map(str, cell.seeds))}", flush=True)
    finally:  # also when it is interrupted
        task.write_archive()


def retrain(count: int) -> None:
    """Train archived cells again, drawn at random over all tasks by what the archives hold, and print both losses."""
    names = [file.name.removesuffix("-worth.json") for file in sorted(FOLDER.glob("*-worth.json"))]
    archives = {name: find_archive(FOLDER / name) for name in names}
    draw = random.Random("".join(map(digest, archives.values())))
    known = {name: read_losses(archive) for name, archive in archives.items()}
    cells = sorted(
        (task, arm, seed)
        for task, losses in known.items()
        for arm in losses.keys() - {rated_name(arm) for arm in losses}
        for seed in losses[arm]
    )
    for name, arm, seed in draw.sample(cells, count):
        with tempfile.TemporaryDirectory() as home:
            task = Task(name, Path(home))
            task.prepare()
            if match := re.fullmatch(r"dense-b(\d+)-r(.+)", arm):
                cell = make_dense(int(match[1]), float(match[2]), [seed])
            else:
                rate = f"training.learning_rate={find_rate(known[name])}"
                cell = Cell(arm, (read_methods(name)[arm], rate), (seed,))
            task.train(cell)
            again, before = task.losses(cell).get(seed, {}), known[name][arm][seed]
        differences = [abs(again[step] - before[step]) for step in before.keys() & again.keys()]
        text = f"{max(differences):.1e}" if before.keys() == again.keys() and differences else "not the same steps"
        print(f"{name}, {arm}, seed {seed}: largest difference of {len(before)} losses: {text}", flush=True)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", metavar="TASK", help="train what this task misses, and archive it")
    parser.add_argument("--measure", metavar="TASK", help="measure what this task's methods miss, and train nothing")
    parser.add_argument(
        "--retrain", type=int, default=0, metavar="CELLS", help="train so many archived cells again, and compare"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="of --run: begin nothing more after so long"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        task = Task(arguments.measure)
        task.measure(find_rate(read_losses(find_archive(FOLDER / task.name))))
    if arguments.retrain:
        retrain(arguments.retrain)
    if arguments.run:
        run(Task(arguments.run), arguments.minutes)
    # A task whose methods were not measured yet has a part of its surface alone, and no predictions.
    names = [file.name.removesuffix("-worth.json") for file in sorted(FOLDER.glob("*-worth.json"))]
    tasks = [read_task(FOLDER, name) for name in names]
    DATA.write_text(json.dumps(tasks, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(tasks), encoding="utf-8")
    print(
        f"{PAGE.relative_to(ROOT)}, {DATA.relative_to(ROOT)}: {', '.join(task['task'] for task in tasks) or 'no task'}"
    )


if __name__ == "__main__":
    main()
