"""Fifty runs that wait for their turn: each works once, never more than the limit at a time, and a stop ends all."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.target.launch import Launch, start_process
from tests.target.conftest import make_run, until

pytestmark = [pytest.mark.promise("R39"), pytest.mark.usefixtures("no_process_left")]
AT_ONCE = 4
WORKER = ["--worker", "sparsebp_cli.testing.worker", "--max-parallel", str(AT_ONCE)]


def watch(runs: list[RunFolder]) -> int:
    """Wait until every run is over; return how many worked at once, at most."""
    most = 0
    while not all(run.state().over for run in runs):
        most = max(most, sum(run.is_locked("worker") for run in runs))
        time.sleep(0.05)
    return most


def submit(number: int, fake: str) -> list[RunFolder]:
    runs = [make_run(fake) for _ in range(number)]
    start_process("sparsebp_cli.target.watcher", WORKER, runs)
    return runs


def check_all_trained_once(number: int) -> None:
    runs = submit(number, "ok")
    assert 1 <= watch(runs) <= AT_ONCE
    assert {run.state() for run in runs} == {State.FINISHED}
    assert {len(History.load(run.path).environments) for run in runs} == {1}


def check_one_stop_ends_all(number: int) -> None:
    runs = submit(number, "slow")
    until(lambda: sum(run.is_locked("worker") for run in runs) == AT_ONCE)
    launch = Launch.load(runs[0])
    assert launch is not None
    os.kill(launch.watcher_pid, signal.SIGTERM)
    until(lambda: not any(run.is_locked("target") for run in runs))
    assert {run.state() for run in runs} == {State.INTERRUPTED}
    assert sum(len(History.load(run.path).environments) for run in runs) == AT_ONCE


def test_runs_that_wait_work_once_each_and_a_stop_ends_all() -> None:
    check_all_trained_once(8)
    check_one_stop_ends_all(8)


@pytest.mark.chaos
@pytest.mark.timeout(3000)
def test_fifty_runs_that_wait_work_once_each_and_a_stop_ends_all(record_property) -> None:
    check_all_trained_once(50)
    check_one_stop_ends_all(50)
    record_property("trials", 100)
