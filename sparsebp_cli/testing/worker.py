"""PUBLIC. A worker that trains nothing but behaves like the real one (lock, event log, signals, exit codes).

    python -m sparsebp_cli.testing.worker RUN/plan.json

A target's option ``worker`` selects it instead of the real worker. ``tracking.tags.fake`` of the recipe selects its
behaviour: ``ok``; ``slow`` (continues until it is stopped); ``stubborn`` (like slow, and ignores signals); ``fail`` (an
exception without a final record); ``data-error`` (the recipe cannot be executed there); ``silent`` (dies before it
opens its event log).
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sparsebp_cli.run import JournalWriter, RunFolder, State, durable, manifest

STEP_SECONDS = 0.05  # duration of a step of a slow worker


def work(run: RunFolder, asked: Callable[[], int | None]) -> int:
    """Execute a plan and return the exit code. ``asked`` returns the signal that stops the worker, None before it; it
    raises to end the worker without a final record. Raise RuntimeError if the recipe selects ``fail``."""
    recipe = json.loads(run.plan_file.read_bytes())["recipe"]
    fake, max_steps = recipe["tracking"]["tags"].get("fake", "ok"), recipe["training"]["max_steps"]
    if fake == "silent":
        print("ImportError: no module named torch", file=sys.stderr)
        return 1
    with run.lock("worker"):
        if run.ended() is State.FINISHED:
            return 0
        with JournalWriter(run.path) as journal:
            step = _find_checkpoint(run)
            journal.write("attempt", from_step=step, environment={"python": "3", "packages": {}})
            journal.write("facts", values={"max_steps": max_steps, "tokens_per_step": 64, "warmup_steps": 1})
            print(f"test worker: {fake} from step {step}", flush=True)
            if fake == "data-error":
                text = "dataset.name: no such file: x.txt"
                print(f"error: {text}", file=sys.stderr)
                journal.write("end", status=State.FAILED, step=0, text=text)
                return 2
            if fake == "fail":
                raise RuntimeError("the test worker broke")
            while step < max_steps or fake in {"slow", "stubborn"}:
                number = asked()
                if number is not None and fake != "stubborn":
                    _save(run, "checkpoints", f"step-{step:08d}", step)
                    journal.write("end", status=State.INTERRUPTED, step=step, text="stopped after a checkpoint")
                    return 128 + number
                step += 1
                journal.write("metrics", step=step, values={"train/loss": 4.0 / (1 + 0.01 * step)})
                if fake != "ok":
                    time.sleep(STEP_SECONDS)
            _save(run, "", "model", step)
            journal.write("end", status=State.FINISHED, step=step, text="")
    return 0


def _find_checkpoint(run: RunFolder) -> int:
    found = sorted((run.path / "checkpoints").glob("step-*"))
    return int(json.loads((found[-1] / "state.json").read_bytes())) if found else 0


def _save(run: RunFolder, parent: str, name: str, step: int) -> None:
    folder = run.path / parent / name
    part = folder.with_name(f"{durable.PART}{name}")
    durable.make_folder(part, exist_ok=True)
    durable.write_file(part / "state.json", str(step))
    manifest.write_manifest(part)
    durable.put_folder(part, folder)


def main() -> int:
    """Execute the plan that the command line names; SIGTERM and SIGINT stop it."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _frame: received.append(got))
    return work(RunFolder(Path(sys.argv[1]).absolute().parent), lambda: received[0] if received else None)


if __name__ == "__main__":
    sys.exit(main())
