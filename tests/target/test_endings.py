"""How runs end: stopped, cancelled, killed, failed; and who says so."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from sparsebp_cli.errors import RunBusyError
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.target.batch import SlurmOptions, render_script
from sparsebp_cli.target.end_record import write_end_record
from sparsebp_cli.target.local import LocalTarget
from sparsebp_cli.target.watcher import LocalRun
from sparsebp_cli.tracking import SyncResult
from tests.target.fake import FakeTarget

from .conftest import last_end, launch_of, make_run, until, wait_for_step, watcher_of, worker_of


@pytest.mark.promise("R10")
def test_every_exit_code_has_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    found: dict[int | None, tuple[str, str]] = {}
    for code in [None, *range(-70, 256)]:
        run = make_run()
        write_end_record(run, code, after_attempt=0)
        end = last_end(run)
        assert end["text"], code
        found[code] = (str(end["status"]), str(end["text"]))
        assert run.state().over
    assert found[255] == (
        "interrupted",
        "the worker was lost: its target ended it with exit code 255, as after a machine failure",
    )
    assert found[137] == found[-9]
    assert found[137][0] == "interrupted"
    assert "SIGKILL" in found[137][1]
    assert found[143] == ("interrupted", "the worker was stopped by SIGTERM before it could write a checkpoint")
    assert found[-40] == ("interrupted", "the worker was killed by signal 40")
    assert found[127] == ("failed", "worker ended with status 127: its command was not found")
    assert found[126][0] == "failed"
    assert found[1] == ("failed", "worker ended with status 1")


class FollowerOfAHangingStore:
    """Has sent nothing when the run is over."""

    def __init__(self, run: RunFolder, **_: object) -> None:
        pass

    def start(self) -> FollowerOfAHangingStore:
        return self

    def stop(self) -> SyncResult:
        return SyncResult(0, False, "the tracking store took longer than 30 s")


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_what_the_last_sending_came_to_is_in_the_warning(
    place: str, target: LocalTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    if place == "here":
        monkeypatch.setattr("sparsebp_cli.target.watcher.Follower", FollowerOfAHangingStore)
        watch = LocalRun(run, target)
        watch.start([], {})
        watch.finish()
    else:
        monkeypatch.setattr("sparsebp_cli.target.remote_run.Follower", FollowerOfAHangingStore)
        FakeTarget(tmp_path / "there").submit(run).wait(60)
    assert run.state() is State.FINISHED
    assert launch_of(run).warning == (
        "the tracking store took longer than 30 s; the event log keeps everything, and "
        f"`sparsebp sync {run.run_id}` sends it later"
    )


def test_stop_leaves_a_run_that_can_be_resumed(target: LocalTarget) -> None:
    run = make_run("slow")
    job = target.submit(run)
    wait_for_step(run)
    job.stop()
    assert job.wait(60) is State.INTERRUPTED
    assert job.exit_code() == 130
    stopped_at = last_end(run)["step"]
    again = target.submit(run)
    until(lambda: len(History.load(run.path).warm) == 2)
    assert History.load(run.path).warm[1] == (2, stopped_at)
    again.cancel()


def test_a_batch_script_obeys_a_stop_asked_for_before_it_started(tmp_path: Path) -> None:
    """Slurm says RUNNING, and loses a signal, before the script has set its traps."""
    worker = tmp_path / "worker"
    worker.write_text('#!/bin/sh\ntrap "exit 143" TERM\nfor _ in $(seq 300); do sleep 0.1; done\n')
    worker.chmod(0o755)
    run = tmp_path / "run"
    run.mkdir()
    script = render_script(SlurmOptions(python=str(worker)), [str(run)])
    (run / "slurm-stop").touch()
    environ = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=script, text=True, env=environ, timeout=25, check=False)
    assert done.returncode == 143
    assert (run / "slurm-exit").read_text() == "7 143\n"


def test_cancel_lets_the_worker_write_a_checkpoint_and_twice_is_once(target: LocalTarget) -> None:
    run = make_run("slow")
    job = target.submit(run)
    wait_for_step(run)
    assert job.cancel() is State.CANCELLED
    job.wait(60)
    assert [end["status"] for end in History.load(run.path).ends] == ["interrupted", "cancelled"]
    assert target.reattach(run).cancel() is State.CANCELLED
    assert len(History.load(run.path).ends) == 2


def test_cancel_kills_a_worker_that_does_not_listen(target: LocalTarget) -> None:
    run = make_run("stubborn")
    job = target.submit(run)
    wait_for_step(run)
    assert job.cancel(grace_seconds=0.3) is State.CANCELLED
    job.wait(60)
    assert job.exit_code() == -signal.SIGKILL
    assert last_end(run)["status"] == "cancelled"


def test_cancel_of_a_finished_run_changes_nothing(target: LocalTarget) -> None:
    run = make_run()
    job = target.submit(run)
    job.wait(60)
    assert job.cancel() is State.FINISHED
    assert not run.cancel_file.exists()


def test_a_cancelled_run_can_be_resumed(target: LocalTarget) -> None:
    run = make_run("slow")
    job = target.submit(run)
    wait_for_step(run)
    job.cancel()
    job.wait(60)
    again = target.submit(run)
    until(lambda: again.status() is State.RUNNING)
    again.stop()
    assert again.wait(60) is State.INTERRUPTED


def test_a_killed_worker_is_interrupted_with_the_reason(target: LocalTarget) -> None:
    run = make_run("slow")
    job = target.submit(run)
    wait_for_step(run)
    worker_of(run).kill()
    assert job.wait(60) is State.INTERRUPTED
    assert job.exit_code() == -signal.SIGKILL
    assert "SIGKILL" in str(last_end(run)["text"])
    assert "memory" in str(last_end(run)["text"])


def test_kill_after_stop_is_told_as_the_users(target: LocalTarget) -> None:
    run = make_run("stubborn")
    job = target.submit(run)
    wait_for_step(run)
    job.stop()
    job.kill()
    assert job.wait(60) is State.INTERRUPTED
    assert "killed by the user" in str(last_end(run)["text"])


@pytest.mark.promise("R10")
def test_a_killed_watcher_leaves_the_worker_and_the_state_right(target: LocalTarget) -> None:
    run = make_run("slow")
    job = target.submit(run)
    wait_for_step(run)
    watcher_of(run).kill()
    until(lambda: not run.is_locked("target"))
    assert job.status() is State.RUNNING
    steps = len(History.load(run.path).series("train/loss"))
    wait_for_step(run, steps + 3)
    with pytest.raises(RunBusyError):
        target.submit(run)
    job.stop()
    assert job.wait(60) is State.INTERRUPTED


def test_cancel_without_a_watcher_is_recorded_all_the_same(target: LocalTarget) -> None:
    run = make_run("slow")
    job = target.submit(run)
    wait_for_step(run)
    watcher_of(run).kill()
    until(lambda: not run.is_locked("target"))
    assert job.cancel() is State.CANCELLED
    assert last_end(run)["status"] == "cancelled"


def test_watcher_and_worker_both_killed_is_interrupted_and_resumable(target: LocalTarget) -> None:
    run = make_run("slow")
    job = target.submit(run)
    wait_for_step(run)
    watcher, worker = watcher_of(run), worker_of(run)
    watcher.kill()
    worker.kill()
    until(lambda: job.status() is State.INTERRUPTED)
    again = target.submit(run)
    until(lambda: len(History.load(run.path).environments) == 2)
    again.cancel()


def test_an_exception_without_an_end_is_failed_with_its_last_line(target: LocalTarget) -> None:
    run = make_run("fail")
    assert target.submit(run).wait(60) is State.FAILED
    assert last_end(run)["text"] == "RuntimeError: the fake broke"


def test_a_worker_that_dies_before_its_journal_is_failed_with_its_last_line(target: LocalTarget) -> None:
    run = make_run("silent")
    assert target.submit(run).wait(60) is State.FAILED
    assert last_end(run)["text"] == "ImportError: no module named torch"


def test_the_reason_of_a_second_failure_is_not_taken_from_the_first(target: LocalTarget) -> None:
    run = make_run("silent")
    target.submit(run).wait(60)
    target.submit(run).wait(60)
    ends = History.load(run.path).ends
    assert [end["attempt"] for end in ends] == [1, 2]


def test_a_usage_error_of_the_worker_keeps_its_exit_code(target: LocalTarget) -> None:
    run = make_run("data-error")
    job = target.submit(run)
    assert job.wait(60) is State.FAILED
    assert job.exit_code() == 2
    assert len(History.load(run.path).ends) == 1


def test_a_run_cancelled_in_the_queue_is_never_started(target: LocalTarget) -> None:
    runs = [make_run("slow"), make_run("slow"), make_run()]
    jobs = target.submit_all(runs)
    assert jobs[1].cancel() is State.CANCELLED
    wait_for_step(runs[0])
    jobs[0].cancel()
    assert jobs[2].wait(60) is State.FINISHED
    assert History.load(runs[1].path).environments == []
    assert last_end(runs[1])["status"] == "cancelled"
