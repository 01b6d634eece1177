"""A worker that keeps the promises of the real one and trains nothing: its loss is what its recipe and its seed say.

The validation loss is the learning rate, plus a draw of the seed that all recipes have in common, plus one of its own.
``training.weight_decay`` 0.5 diverges. ``tracking.tags.pace`` are the milliseconds of a step.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.identity import find_code
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run import JournalWriter, RunFolder, State


def main() -> int:
    run = RunFolder(Path(sys.argv[1]).parent)
    plan = Plan.load(run.plan_file)
    with run.lock("worker"):
        # A watcher may be killed between the start of a worker and its lock; so the next one may find the run finished.
        return 0 if run.ended() is State.FINISHED else train(run, plan.recipe, plan.group)


def train(run: RunFolder, recipe: Recipe, group: str) -> int:
    training = recipe.training
    with JournalWriter(run.path) as journal:
        journal.write("attempt", from_step=0, environment={"python": "3", "packages": {}})
        journal.write("seal", values=Seal(recipe.model_dump(mode="json"), find_code(recipe), "data").to_json())
        for step in range(1, training.max_steps + 1):
            journal.write("metrics", step=step, values=measure())
            time.sleep(float(recipe.tracking.tags.get("pace", "0")) / 1000)
        if training.weight_decay == 0.5:
            journal.write("end", status="failed", step=step, text="diverged: the loss is nan at step 1")
            return 3
        values = {"eval/loss": find_loss(recipe, group)}
        if recipe.measure.test and recipe.dataset.test_fraction is not None:
            values["test/loss"] = values["eval/loss"] + 1.0
        journal.write("metrics", step=step, values=values)
        journal.write("end", status="finished", step=step, text="")
    return 0


def find_loss(recipe: Recipe, group: str) -> float:
    """Return the loss of a recipe with its seed: standard deviation 0.1, of which most is the seed's alone."""
    seed = recipe.training.seed
    common, own = (random.Random(f"{key} {seed}").gauss(0.0, 1.0) for key in ("all", group))
    return recipe.training.learning_rate + 0.1 * (0.9**0.5 * common + 0.1**0.5 * own)


def measure() -> dict[str, float]:
    costs = {"flops/step": 1e9, "flops/step_dense": 1e9, "flops/update_dense": 1e8}
    return {"train/loss": 4.0, "time/step_seconds": 0.01, **costs}


if __name__ == "__main__":
    sys.exit(main())
