"""Run folders as a worker leaves them, written through the real journal and the real plan."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from sparsebp_cli.plan import Plan
from sparsebp_cli.plan.provenance import Provenance
from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run import JournalWriter, RunFolder, create_run

MakeRun = Callable[..., RunFolder]

FORWARD, DENSE = 1e9, 2e9
ENVIRONMENT = {"python": "3.11", "cpu": "a cpu", "cores": 2, "gpu": "", "packages": {"torch": "2.13", "peft": ""}}


def make_recipe(name: str, policy: list[dict[str, Any]], seed: int, **sections: Any) -> Recipe:
    """A recipe of 20 steps."""
    training = {"max_steps": 20, "seed": seed} | sections.pop("training", {})
    base = {"version": 1, "name": name, "model": {"name": "m"}, "dataset": {"name": "d"}, "policy": policy}
    return Recipe.model_validate(base | {"training": training, "measure": {"warmup_steps": 3}} | sections)


def step_values(step: int, seconds: float, noise: random.Random) -> dict[str, float]:
    """What one step logs; the first three are slow."""
    total = (10.0 if step <= 3 else seconds) * (1 + 0.02 * noise.random())
    return {
        "train/loss": 5.0 - 0.01 * step,
        "policy/kept_share": 0.5,
        "time/step_seconds": total,
        "time/forward_seconds": 0.3 * total,
        "time/backward_seconds": 0.6 * total,
        "time/optimizer_seconds": 0.1 * total,
        "throughput/tokens_per_sec": 1024 / total,
        "memory/peak_resident_bytes": 1.2e9,
        "memory/weight_bytes": 1e8,
        "memory/optimizer_bytes": 2e8,
    }


def probe_values(executed: float, claimed: float) -> dict[str, float]:
    """What one probe logs."""
    ceiling = (FORWARD + DENSE) / (FORWARD + claimed * DENSE)
    values = {"flops/forward": FORWARD, "flops/backward_dense": DENSE, "flops/backward_executed": executed * DENSE}
    values |= {"speed/ceiling": ceiling, "fidelity/cosine": 0.9, "memory/saved_for_backward_bytes": 5e7}
    return values | ({"speed/realised_share": 0.8} if ceiling > 1.001 else {})


@pytest.fixture
def make_run(home_folder: Any) -> MakeRun:
    """A function that writes one run and returns its folder."""
    clock = iter(range(10_000))

    def make(
        name: str = "dense",
        seed: int = 0,
        *,
        policy: list[dict[str, Any]] | None = None,
        exact: bool = True,
        loss: float = 3.0,
        seconds: float = 0.2,
        end: str | None = "finished",
        text: str = "",
        steps: int = 20,
        executed: float = 1.0,
        claimed: float = 1.0,
        environment: dict[str, Any] | None = None,
        facts: dict[str, Any] | None = None,
        metrics: dict[str, float] | None = None,
        provenance: Provenance | None = None,
        start: float | None = None,
        **sections: Any,
    ) -> RunFolder:
        policy = policy or [{"name": "dense"}]
        born = 1_700_000_000.0 + 1000 * next(clock) if start is None else start
        recipe = make_recipe(name, policy, seed, **sections)
        plan = Plan(recipe=recipe, created=born, provenance=provenance or Provenance())
        run = create_run(plan.run_id)
        plan.save(run.path)
        told = [{"name": entry["name"], "exact": exact, "unbiased": exact, "source": "x"} for entry in policy]
        noise = random.Random(seed)
        with pytest.MonkeyPatch.context() as patch, JournalWriter(run.path, durable=False) as journal:
            now = iter(born + 0.5 * tick for tick in range(10_000))
            patch.setattr(time, "time", lambda: next(now))
            journal.write("attempt", from_step=0, environment=ENVIRONMENT | (environment or {}))
            known = {"max_steps": 20, "warmup_steps": 3, "device": "cpu", "threads": 1, "dataset_digest": "abc"}
            journal.write("facts", values=known | {"policies": told} | (facts or {}))
            journal.write("metrics", step=0, values={"eval/loss": 6.0})
            for step in range(1, steps + 1):
                journal.write("metrics", step=step, values=step_values(step, seconds, noise))
                if step == 5:
                    journal.write("metrics", step=step, values={"memory/step_peak_bytes": 4e8})
                if step % 10 == 0:
                    share = (step - 10) / 10
                    values = {"eval/loss": loss + 1.0 - share, "eval/accuracy": 0.5} | probe_values(executed, claimed)
                    journal.write("metrics", step=step, values=values | (metrics or {}))
            if end:
                journal.write("end", status=end, step=steps, text=text)
        return run

    return make


@pytest.fixture
def two_groups(make_run: MakeRun) -> list[RunFolder]:
    """Five seeds of dense, and five of a policy that is worse by 0.1 and faster."""
    losses = [3.00, 3.02, 2.98, 3.05, 2.97]
    runs = [make_run("dense", seed, loss=loss) for seed, loss in enumerate(losses)]
    extra = [0.10, 0.11, 0.09, 0.10, 0.12]
    topk = [{"name": "topk", "keep": 0.1, "along": "rows"}]
    runs += [
        make_run(
            "topk-rows",
            seed,
            policy=topk,
            exact=False,
            loss=losses[seed] + more,
            seconds=0.13,
            executed=0.1,
            claimed=0.1,
        )
        for seed, more in enumerate(extra)
    ]
    return runs
