"""The target ``local``, with real processes and a worker that trains nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebp_cli.errors import RunBusyError, RunFailedError
from sparsebp_cli.run import History, JournalWriter, RunFolder, State
from sparsebp_cli.target import local
from sparsebp_cli.target.launch import Launch
from sparsebp_cli.target.local import LocalTarget

from .conftest import UNUSABLE, launch_of, make_run, wait_for_step, worker_of

HUNG = """
import pathlib, sys, time
from sparsebp_cli.run import RunFolder
lock = RunFolder(pathlib.Path(sys.argv[1])).lock("target")
print("holds it", flush=True)
time.sleep(3600)
"""


def test_a_run_is_finished_and_its_output_kept(target: LocalTarget) -> None:
    run = make_run()
    job = target.submit(run)
    assert job.wait(60) is State.FINISHED
    assert job.exit_code() == 0
    assert list(job.logs()) == ["fake worker: ok from step 0"]
    assert [end["status"] for end in History.load(run.path).ends] == ["finished"]
    assert job.fetch() == run.path


def test_a_run_reaches_the_tracking_store_before_it_is_settled(target: LocalTarget) -> None:
    target.submit(make_run(uri=None)).wait(120)  # makes the store, which may take longer than a watcher waits
    run = make_run(uri=None)
    job = target.submit(run)
    job.wait(120)
    assert job.warning() == ""
    assert json.loads((run.path / "tracking.json").read_text())["offset"] == (run.path / "journal.jsonl").stat().st_size


def test_a_store_that_cannot_be_used_is_a_warning_and_no_failure(target: LocalTarget) -> None:
    run = make_run(uri=UNUSABLE)
    job = target.submit(run)
    assert job.wait(60) is State.FINISHED
    assert "sparsebp sync" in job.warning()
    assert "\n" not in job.warning()


def test_the_command_is_the_one_that_runs(target: LocalTarget) -> None:
    run = make_run("slow")
    target.submit(run)
    assert worker_of(run).cmdline() == target.command(run)
    target.reattach(run).cancel()


def test_the_command_of_a_run_that_does_not_exist_writes_nothing(tmp_path: Path) -> None:
    command = LocalTarget().command(RunFolder(tmp_path / "none"))
    assert command[1:] == ["-P", "-m", "sparsebp_cli.worker", str(tmp_path / "none" / "plan.json")]
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_queued_then_running_then_over(target: LocalTarget) -> None:
    run = make_run("slow")
    assert run.state() is State.QUEUED
    job = target.submit(run)
    assert job.status() in {State.QUEUED, State.RUNNING}
    wait_for_step(run)
    assert job.status() is State.RUNNING
    assert job.wait(0.2) is State.RUNNING
    assert job.cancel() is State.CANCELLED


def test_a_live_run_is_never_started_twice(target: LocalTarget) -> None:
    run = make_run("slow")
    job = target.submit(run)
    with pytest.raises(RunBusyError, match=run.run_id):
        target.submit(run)
    wait_for_step(run)
    with pytest.raises(RunBusyError, match=run.run_id):
        target.submit(run)
    job.cancel()
    assert len(History.load(run.path).environments) == 1


def test_runs_in_a_queue_go_one_after_the_other(target: LocalTarget) -> None:
    runs = [make_run() for _ in range(3)]
    jobs = target.submit_all(runs)
    assert [job.wait(120) for job in jobs] == [State.FINISHED] * 3
    spans = [next(end["time"] for end in History.load(run.path).ends) for run in runs]
    assert spans == sorted(spans)


def test_stop_ends_the_queue_behind_the_run(target: LocalTarget) -> None:
    runs = [make_run("slow"), make_run()]
    jobs = target.submit_all(runs)
    wait_for_step(runs[0])
    assert jobs[1].status() is State.QUEUED
    jobs[0].stop()
    assert [job.wait(60) for job in jobs] == [State.INTERRUPTED, State.INTERRUPTED]
    assert History.load(runs[1].path).environments == []


def test_a_watcher_that_was_stopped_does_not_keep_a_cancellation_waiting(target: LocalTarget) -> None:
    run = make_run("stubborn")
    job = target.submit(run)
    wait_for_step(run)
    launch = launch_of(run)
    os.kill(launch.watcher_pid, signal.SIGSTOP)
    worker_of(run).kill()
    assert job.cancel(grace_seconds=0.5) is State.CANCELLED
    assert not [end for end in History.load(run.path).ends if end["status"] != "cancelled"]


def test_a_watcher_that_hangs_is_killed_after_the_time_of_a_cancellation(
    target: LocalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "WATCHER_SECONDS", 0.5)
    run = make_run()
    hung = subprocess.Popen([sys.executable, "-c", HUNG, run.path], stdout=subprocess.PIPE)
    assert hung.stdout is not None
    assert hung.stdout.readline() == b"holds it\n"
    Launch(after_attempt=0, watcher_pid=hung.pid).save(run)
    with JournalWriter(run.path) as journal:  # of a worker that was killed
        journal.write("attempt", from_step=0, environment={})
    assert run.state() is State.RUNNING
    assert target.reattach(run).cancel(grace_seconds=0.2) is State.CANCELLED
    assert hung.wait() == -signal.SIGKILL
    hung.stdout.close()
    assert [end["status"] for end in History.load(run.path).ends] == ["cancelled"]


def test_a_pid_that_belongs_to_somebody_else_is_never_signalled(target: LocalTarget) -> None:
    run = make_run()
    target.submit(run).wait(60)
    Launch(after_attempt=0, watcher_pid=os.getpid(), worker_pid=os.getpid()).save(run)
    target.reattach(run).kill()
    target.reattach(run).stop()
    assert launch_of(run).worker(run) is None


def test_a_folder_that_cannot_be_written_is_one_line(target: LocalTarget) -> None:
    run = make_run()
    (run.path / "target.json").mkdir()
    with pytest.raises(RunFailedError, match=r"could not be started: .*target\.json") as caught:
        target.submit(run)
    assert "\n" not in str(caught.value)
    assert not run.is_locked("target")


def test_following_the_log_ends_with_the_run(target: LocalTarget) -> None:
    run = make_run(max_steps=30)
    job = target.submit(run)
    assert list(job.logs(follow=True)) == ["fake worker: ok from step 0"]
    assert job.status() is State.FINISHED


def test_asking_for_the_state_never_keeps_a_worker_from_its_lock(target: LocalTarget) -> None:
    run = make_run()
    for _ in range(50):
        assert not run.is_locked("worker")
        with run.lock("worker"):
            assert run.is_locked("worker")
