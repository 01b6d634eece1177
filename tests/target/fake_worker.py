"""A worker that keeps the promises of the real one (lock, journal, signals, exit codes) and trains nothing.

``tracking.tags.fake`` of the plan says what it does: ``ok``, ``slow`` (until it is stopped), ``stubborn`` (never stops
by itself), ``fail`` (an exception without an ``end``), ``data-error``, ``silent`` (dies before it opens the journal).
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from sparsebp_cli.run import JournalWriter, RunFolder


def main() -> int:
    run = RunFolder(Path(sys.argv[1]).parent)
    recipe = json.loads(run.plan_file.read_bytes())["recipe"]
    behaviour, max_steps = recipe["tracking"]["tags"].get("fake", "ok"), recipe["training"]["max_steps"]
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, frame: asked.append(got))
    if behaviour == "silent":
        print("ImportError: no module named torch", file=sys.stderr)
        return 1
    with run.lock("worker"), JournalWriter(run.path) as journal:
        first = int((run.path / "step").read_text()) if (run.path / "step").exists() else 0
        journal.write("attempt", from_step=first, environment={"python": "3", "packages": {}})
        journal.write("facts", values={"max_steps": max_steps, "tokens_per_step": 64, "warmup_steps": 1})
        print(f"fake worker: {behaviour} from step {first}")
        if behaviour == "data-error":
            journal.write("end", status="failed", step=0, text="dataset.name: no such file: x.txt")
            return 2
        if behaviour == "fail":
            raise RuntimeError("the fake broke")
        step = first
        if step == 0:
            journal.write("metrics", step=0, values={"eval/loss": 4.1})
        while step < max_steps or behaviour in {"slow", "stubborn"}:
            if asked and behaviour != "stubborn":
                (run.path / "step").write_text(str(step))
                journal.write("end", status="interrupted", step=step, text="stopped after a checkpoint")
                return 128 + asked[0]
            step += 1
            journal.write("metrics", step=step, values=measure(step))
            if step % 20 == 0 or step == max_steps:
                journal.write("metrics", step=step, values={"eval/loss": 4.1 / (1 + 0.01 * step)})
            if behaviour != "ok":
                time.sleep(0.02)
        journal.write("end", status="finished", step=step, text="")
    return 0


def measure(step: int) -> dict[str, float]:
    return {
        "train/loss": 4.0 / (1 + 0.01 * step),
        "policy/kept_share": 0.1,
        "throughput/tokens_per_sec": 6400.0,
        "time/forward_seconds": 0.003,
        "time/backward_seconds": 0.006,
        "time/optimizer_seconds": 0.001,
        "time/step_seconds": 0.010,
        "memory/peak_resident_bytes": 500e6,
        "memory/weight_bytes": 100e6,
        "flops/backward_executed": 1e9,
        "flops/backward_dense": 4e9,
        "fidelity/cosine": 0.9,
        "speed/ceiling": 2.0,
        "speed/speedup": 1.5,
        "probe/dense_seconds": 0.009,
        "probe/policy_seconds": 0.006,
        "speed/realised_share": 0.66,
    }


if __name__ == "__main__":
    sys.exit(main())
