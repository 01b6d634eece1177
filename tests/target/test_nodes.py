"""Runs on several nodes of a real Slurm, and the relays of several pods."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.target.engine import LOST_CODE, MOST_RESTARTS
from sparsebp_cli.worker import node as node_of_worker

from .conftest import last_end, until, wait_for_step
from .test_engines import TRAINED, Options, go_on, handle_of, prepare

pytestmark = [pytest.mark.slow, pytest.mark.promise("R26"), pytest.mark.xdist_group("engines")]
SECONDS = 15  # after which a node counts as lost
WORKER = {"worker": "sparsebp_cli.worker", "threads": 1, "device": "cpu", "processes": 2}
ON_TWO = WORKER | {"nodes": 2, "peer_timeout_min": SECONDS / 60, "memory": "2g", "env": {"OMP_NUM_THREADS": "1"}}
LONG = TRAINED | {"training": {"max_steps": 100_000, "per_device_train_batch_size": 2}, "checkpoint": {"every": 2}}


def launcher(run: RunFolder, number: int) -> psutil.Process:
    """The worker that Slurm started on a node; its ranks have a LOCAL_RANK."""
    for process in psutil.process_iter(["cmdline"]):
        if str(run.plan_file) in (process.info["cmdline"] or []) and process.name().startswith("python"):
            environment = process.environ()
            if environment.get("SPARSEBP_NODE") == str(number) and "LOCAL_RANK" not in environment:
                return process
    raise AssertionError(f"no launcher of node {number}")


def test_the_two_know_the_same_exit_code_of_a_lost_node() -> None:
    assert node_of_worker.LOST_CODE == LOST_CODE


def test_two_nodes_of_slurm_train_as_two_processes_of_one_to_the_same_bits(slurm_options: Options) -> None:
    found = []
    for options in ({"kind": "local", **WORKER}, {"kind": "slurm", **slurm_options, **ON_TWO}):
        run, target = prepare(str(options.pop("kind")), options, **TRAINED)
        job = target.submit(run)
        assert job.wait(300) is State.FINISHED, list(job.logs())[-5:]
        history = History.load(run.path)
        found.append([history.series(name) for name in ("train/loss", "train/grad_norm", "eval/loss")])
    assert found[0] == found[1]
    assert len(found[0][0]) == 4


@pytest.mark.long
def test_a_job_that_loses_a_node_is_put_back_and_goes_on_by_itself(slurm_options: Options) -> None:
    run, target = prepare("slurm", slurm_options | ON_TWO, **LONG)
    job = target.submit(run)
    wait_for_step(run, 4)
    handle = handle_of(run)
    launcher(run, 1).kill()
    until(lambda: job.status() is State.QUEUED, 4 * SECONDS)
    assert f"is lost: it sent nothing for {SECONDS} seconds" in str(last_end(run)["text"])
    go_on(run, handle)
    assert History.load(run.path).warm[1][1] >= 2
    assert job.cancel() is State.CANCELLED


@pytest.mark.long
def test_a_cancelled_job_of_two_nodes_makes_a_checkpoint(slurm_options: Options) -> None:
    run, target = prepare("slurm", slurm_options | ON_TWO, **LONG)
    job = target.submit(run)
    wait_for_step(run, 3)
    assert job.cancel(60) is State.CANCELLED
    ends = History.load(run.path).ends
    assert ends[0]["text"] == f"SIGTERM: stopped after step {ends[0]['step']}"
    assert (run.path / "checkpoints" / f"step-{ends[0]['step']:08d}").is_dir()


PROGRAM = """
import os, sys
from pathlib import Path
count = Path(sys.argv[1]).with_name("count-" + os.environ["SPARSEBP_NODE"])
count.write_text(str(int(count.read_text() or 0) + 1) if count.exists() else "1")
print("worker", os.environ["SPARSEBP_NODE"])
sys.exit(4 if count.read_text() == "1" else 0)
"""


def test_only_the_first_pods_relay_writes_and_all_restart_after_a_lost_node(tmp_path: Path) -> None:
    (tmp_path / "lost_once.py").write_text(PROGRAM)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".go").touch()
    for number in (1, 0):
        words = [sys.executable, "-m", "sparsebp_cli.target.relay", "lost_once", str(folder), "0"]
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "SPARSEBP_NODE": str(number)}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"worker {number}\n" * 2)
        assert (folder / f"count-{number}").read_text() == "2"
        names = {file.name for file in folder.iterdir()} - {".go", "count-0", "count-1"}
        assert names == (set() if number else {".state", ".pid", "worker.log"})
    assert (folder / ".state").read_text() == "over 0"
    assert (folder / "worker.log").read_text() == "worker 0\n" * 2
    assert MOST_RESTARTS == 3
