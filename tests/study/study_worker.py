"""A worker that keeps the promises of the real one and trains nothing; its numbers follow from the recipe.

The validation loss is least at a learning rate of 1e-3, the test loss is greatest there. A step with ``topk`` costs
half of a dense one, in work and in time, and has 64 tokens. ``tracking.tags.pace`` are the milliseconds of a step;
``fail`` names an arm that does, ``diverge`` a learning rate. While the file ``hold`` exists, no step after the second
begins.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path

from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.identity import find_code
from sparsebp_cli.plan.seal import Seal
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run import JournalWriter, RunFolder, State
from sparsebp_cli.worker.ending import pause_message

CHECKPOINT_EVERY = 5
HELD_AFTER = 2  # steps


def main() -> int:
    run = RunFolder(Path(sys.argv[1]).parent)
    recipe = Plan.load(run.plan_file).recipe
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, frame: asked.append(got))
    with run.lock("worker"):
        # A watcher may be killed between the start of a worker and its lock; so the next one may find the run finished.
        return 0 if run.ended() is State.FINISHED else train(run, recipe, asked)


def train(run: RunFolder, recipe: Recipe, asked: list[int]) -> int:
    tags, training = recipe.tracking.tags, recipe.training
    with JournalWriter(run.path) as journal:
        kept = run.path / "step"
        step = int(kept.read_text()) if kept.exists() else 0
        journal.write("attempt", from_step=step, environment={"python": "3", "packages": {}})
        journal.write("seal", values=Seal(recipe.model_dump(mode="json"), find_code(recipe), "data").to_json())
        exact = recipe.policy[0].name == "dense"
        journal.write("facts", values={"policies": [{"name": recipe.policy[0].name, "exact": exact}]})
        if tags.get("fail") == recipe.name:
            journal.write("end", status="failed", step=step, text="the fake broke")
            return 1
        stop_at = recipe.checkpoint.stop_at or training.max_steps
        far = abs(math.log(training.learning_rate / 1e-3)) + 0.01 * training.seed
        while step < training.max_steps:
            if step >= stop_at:
                kept.write_text(str(step))
                journal.write("end", status="interrupted", step=step, text=pause_message(step))
                return 0
            if asked:
                kept.write_text(str(step))
                journal.write("end", status="interrupted", step=step, text="stopped after a checkpoint")
                return 128 + asked[0]
            while step == HELD_AFTER and Path(tags.get("hold", "/nonexistent")).exists() and not asked:
                time.sleep(0.02)
            step += 1
            journal.write("metrics", step=step, values=measure(step, training.per_device_train_batch_size, exact=exact))
            if tags.get("diverge") == f"{training.learning_rate:g}":
                journal.write("end", status="failed", step=step, text="diverged: the loss is nan at step 1")
                return 3
            if step % recipe.measure.eval_every == 0:
                journal.write("metrics", step=step, values={"eval/loss": 5.0 + far})
            if step % CHECKPOINT_EVERY == 0:
                part = kept.with_suffix(".part")
                part.write_text(str(step))
                part.replace(kept)
            time.sleep(float(tags.get("pace", "0")) / 1000)
        journal.write("metrics", step=step, values={"eval/loss": 3.0 + far, "test/loss": 9.0 - far})
        journal.write("end", status="finished", step=step, text="")
    return 0


def measure(step: int, examples: int, *, exact: bool) -> dict[str, float]:
    share = 1.0 if exact else 0.25
    return {
        "train/loss": 4.0,
        "time/forward_seconds": 0.004,
        "time/backward_seconds": 0.006,
        "time/optimizer_seconds": 0.0,
        "time/step_seconds": 0.010 if exact else 0.005,
        "train/tokens": 64.0 * step,
        "probe/dense_seconds": 0.010,
        "probe/policy_seconds": 0.010 if exact else 0.005,
        "flops/forward": 1e9,
        "flops/backward_executed": 4e9 * share,
        "flops/backward_dense": 4e9,
        "flops/step": 1e9 + 5e9 * examples / 8 * (1.0 if exact else 0.4),
        "flops/step_dense": 1e9 + 5e9 * examples / 8,
        "flops/update_dense": 1e9,
    }


if __name__ == "__main__":
    sys.exit(main())
