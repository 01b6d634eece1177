"""Following a run never raises, warns once, and ends in bounded time."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.run import RunFolder
from sparsebp_cli.tracking import Follower, sync
from tests.tracking.material import attempt, metric_rows

MakeRun = Callable[..., RunFolder]


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something holds; the test's own timeout ends what never does."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.02)


def test_points_arrive_while_the_run_lives_and_the_last_ones_at_its_end(store: Path, make_run: MakeRun) -> None:
    run = make_run(5, end=None)
    with Follower(run, every=0.05) as follower:
        wait_for(lambda: follower.result.points_sent == 10)
        attempt(run, 5, 9, end=None)
        wait_for(lambda: follower.result.points_sent == 18)
        follower.every = 1000.0
        attempt(run, 9, 12)
    assert (follower.result.points_sent, follower.result.complete, follower.result.problem) == (24, True, "")
    assert follower.warnings == []
    assert len(metric_rows(store)) == 24


def test_a_server_that_is_not_there_is_one_warning_and_nothing_is_lost(
    store: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://me:CANARY@127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = make_run(5)
    journal = (run.path / "journal.jsonl").read_bytes()
    said: list[str] = []
    follower = Follower(run, every=0.01, warn=said.append)
    for _ in range(3):
        assert not follower.flush().complete
    with follower:
        pass
    assert len(said) == 1
    assert follower.warnings == said
    assert "sparsebp sync" in said[0]
    assert "\n" not in said[0]
    assert "CANARY" not in said[0] + repr(follower.result)
    assert "CANARY" not in "".join(file.read_text() for file in run.path.iterdir() if file.name != "plan.json")
    assert (run.path / "journal.jsonl").read_bytes() == journal
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert sync(run).points_sent == 10
    assert len(metric_rows(store)) == 10


def test_a_server_that_never_answers_does_not_hold_the_end_of_a_run(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        follower = Follower(make_run(2), within=0.2).start()
        result = follower.stop()
        assert (result.complete, result.problem) == (False, "the tracking store took longer than 0.2 s")
        wait_for(lambda: len(follower.warnings) == 1)


@pytest.mark.parametrize("damage", ["no plan", "no folder"])
def test_nothing_that_is_wrong_with_the_run_raises(store: Path, make_run: MakeRun, damage: str, tmp_path: Path) -> None:
    run = make_run(2)
    if damage == "no plan":
        run.plan_file.unlink()
    else:
        run = RunFolder(tmp_path / "gone")
    with Follower(run, every=0.01) as follower:
        pass
    assert not follower.result.complete
    assert len(follower.warnings) == 1
    assert "\n" not in follower.warnings[0]


def test_training_comes_first_only_the_followers_thread_is_nice(store: Path, make_run: MakeRun) -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    found: list[int] = []
    run = make_run(2)
    run.plan_file.unlink()

    def note(_: str) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    with Follower(run, every=0.01, warn=note):
        wait_for(lambda: bool(found))
    with Follower(run, every=1000.0, warn=note):  # nothing is trained while the rest is sent
        pass
    assert found == [10, before]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
