"""Faults in large numbers in runs on two nodes: each run ends in time and says why, and resumes."""

from __future__ import annotations

import os
import random
import signal
import time

import psutil
import pytest

from sparsebp_cli.run import History, State
from tests.worker.test_nodes import on_nodes, start_nodes

NUM_FAULTS = 40
RESUMES = 4  # every so many trials the run is resumed
MOST_SECONDS = 120  # peer_timeout_min is 15 seconds here, and as much again is the grace
pytestmark = [pytest.mark.chaos, pytest.mark.promise("R26"), pytest.mark.xdist_group("two processes")]
# Who gets which signal. A launcher that is stopped for good cannot end itself: its node is what the run loses.
FAULTS = [
    (kind, node, number)
    for kind in ("rank", "launcher")
    for node in (0, 1)
    for number in (signal.SIGKILL, signal.SIGSTOP)
    if (kind, node, number) != ("launcher", 0, signal.SIGSTOP)
]

TOLD = {
    ("rank", signal.SIGKILL): "rank {} of 2 was killed by SIGKILL",
    ("rank", signal.SIGSTOP): "another process did not answer for 0.25 minutes (target.peer_timeout_min)",
    ("launcher", signal.SIGKILL): "is lost: it sent nothing for 15 seconds",
    ("launcher", signal.SIGSTOP): "is lost: it sent nothing for 15 seconds",
}


@pytest.mark.timeout(12_000)
def test_a_run_that_loses_a_rank_or_a_launcher_ends_in_time_and_resumes(tiny_recipe, prepared, record_property) -> None:
    chance = random.Random(26)
    for trial in range(NUM_FAULTS):
        kind, node, number = FAULTS[trial % len(FAULTS)]
        training = {"max_steps": 100_000, "per_device_train_batch_size": 4}
        run = prepared(on_nodes(tiny_recipe, 2, training=training, checkpoint={"every": 2}))
        workers = start_nodes(run)
        steps = chance.randrange(3, 12)
        while len(History.load(run.path).series("train/loss")) < steps:
            assert workers[0].is_alive(), (run.path / "worker.log").read_text()
            time.sleep(chance.random() * 0.05)
        launchers = [psutil.Process(worker.pid) for worker in workers]
        ranks = [launcher.children()[0] for launcher in launchers]
        os.kill((ranks if kind == "rank" else launchers)[node].pid, number)
        begin = time.monotonic()
        for position, worker in enumerate(workers):
            if (kind, position, number) != ("launcher", node, signal.SIGSTOP):
                worker.join(MOST_SECONDS)
                assert worker.exitcode is not None, (trial, kind, node, number)
        assert time.monotonic() - begin < MOST_SECONDS, (trial, kind, node, number)
        for process in [*launchers, *ranks]:
            if process.is_running():
                process.kill()
        psutil.wait_procs([*launchers, *ranks], timeout=30)
        is_told = (kind, node) != ("launcher", 0)
        assert run.state() is (State.FAILED if is_told else State.INTERRUPTED), (trial, kind, node, number)
        if is_told:
            assert TOLD[kind, number].format(node) in History.load(run.path).ends[-1]["text"], (trial, node)
        if trial % RESUMES == 0:
            again = start_nodes(run)
            while len(History.load(run.path).warm) < 2:
                assert again[0].is_alive(), (run.path / "worker.log").read_text()
                time.sleep(0.05)
            os.kill(again[0].pid, signal.SIGTERM)
            for worker in again:
                worker.join(MOST_SECONDS)
            assert [worker.exitcode for worker in again] == [143, 143], (trial, kind, node, number)
        record_property("of which", (f"{signal.Signals(number).name} to a {kind}", 1))
    record_property("trials", NUM_FAULTS)
