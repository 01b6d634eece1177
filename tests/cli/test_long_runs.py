"""Runs of very many steps are shown and compared in little memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from sparsebp_cli.run import JournalWriter, RunFolder

from ..compare.conftest import MakeRun, make_run
from .conftest import REAL

__all__ = ["make_run"]
STEPS = 40_000
PEAK = "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL); \
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"
OTHERS = [f"policy/other_{number}" for number in range(12)]


def lengthen(run: RunFolder) -> None:
    """Give a finished run many more steps, as long a line each as a real one's."""
    chance = random.Random(run.run_id)
    with (run.path / "journal.jsonl").open("a", encoding="utf-8") as journal:
        for step in range(21, STEPS):
            names = ["train/loss", "time/step_seconds", "time/step_cpu_seconds", "time/forward_seconds"]
            names += ["time/backward_seconds", "time/optimizer_seconds", "host/load", *OTHERS]
            values = {name: 1.0 + chance.random() for name in names}
            record = {"kind": "metrics", "attempt": 1, "time": 1.7e9 + step, "step": step, "values": values}
            journal.write(json.dumps(record) + "\n")
    with JournalWriter(run.path, durable=False) as opened:
        opened.write("end", status="finished", step=STEPS - 1, text="")


def measure(*words: str) -> int:
    """Return the peak memory of a command in MB."""
    done = subprocess.run([sys.executable, "-c", PEAK, *REAL, *words], check=True, capture_output=True, text=True)
    code, peak = done.stdout.split()
    assert code == "0", done.stderr
    return int(peak)


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "bytes_a_step"), [("show", 400), ("compare", 1000)])
def test_a_verb_reads_long_runs_in_few_bytes_a_step(verb: str, bytes_a_step: int, make_run: MakeRun) -> None:
    """With dictionaries and a column of times for each metric they took 660 and 1,560."""
    short = [make_run("dense", seed) for seed in range(1 if verb == "show" else 2)]
    before = measure(verb, *(run.run_id for run in short))
    for run in short:
        lengthen(run)
    assert measure(verb, *(run.run_id for run in short)) - before < bytes_a_step * STEPS / 2**20
