"""The target ``local``, with real processes and a worker that trains nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sparsebp_cli.errors import RunBusyError, RunFailedError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder, State, create_run
from sparsebp_cli.target import LocalTarget
from sparsebp_cli.target.launch import Launch

UNUSABLE = "file:///nowhere"  # refused before mlflow is imported, which takes seconds


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> LocalTarget:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return LocalTarget("fake_worker")


def make_run(fake: str = "ok", max_steps: int = 5, uri: str | None = UNUSABLE) -> RunFolder:
    recipe = Recipe.model_validate(
        {
            "version": 1,
            "name": f"fake-{fake}",
            "model": {"name": "none"},
            "dataset": {"name": "none"},
            "training": {"max_steps": max_steps, "optim_args": {"fake": fake}},
            "tracking": {"uri": uri},
        }
    )
    plan = Plan(recipe=recipe)
    run = create_run(plan.run_id)
    plan.save(run.path)
    return run


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def wait_for_step(run: RunFolder, step: int = 2) -> None:
    until(lambda: step in History.load(run.path).series("train/loss"))


def last_end(run: RunFolder) -> dict[str, object]:
    return History.load(run.path).ends[-1]


def launch_of(run: RunFolder) -> Launch:
    launch = Launch.load(run)
    assert launch is not None
    return launch


def worker_of(run: RunFolder) -> psutil.Process:
    until(lambda: launch_of(run).worker(run) is not None)
    worker = launch_of(run).worker(run)
    assert worker is not None
    return worker


def watcher_of(run: RunFolder) -> psutil.Process:
    watcher = launch_of(run).watcher(run)
    assert watcher is not None
    return watcher


def test_a_run_is_finished_and_its_output_kept(target: LocalTarget) -> None:
    run = make_run()
    job = target.submit(run)
    assert job.wait(60) is State.FINISHED
    assert job.exit_code() == 0
    assert list(job.logs()) == ["fake worker: ok from step 0"]
    assert [end["status"] for end in History.load(run.path).ends] == ["finished"]
    assert job.fetch() == run.path


def test_a_run_reaches_the_tracking_store_before_it_is_settled(target: LocalTarget) -> None:
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
    assert command[1:] == ["-m", "sparsebp_cli.worker", str(tmp_path / "none" / "plan.json")]
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


def test_runs_in_a_queue_go_one_after_the_other(target: LocalTarget) -> None:
    runs = [make_run() for _ in range(3)]
    jobs = target.submit_all(runs)
    assert [job.wait(120) for job in jobs] == [State.FINISHED] * 3
    spans = [next(end["time"] for end in History.load(run.path).ends) for run in runs]
    assert spans == sorted(spans)


def test_a_run_cancelled_in_the_queue_is_never_started(target: LocalTarget) -> None:
    runs = [make_run("slow"), make_run("slow"), make_run()]
    jobs = target.submit_all(runs)
    assert jobs[1].cancel() is State.CANCELLED
    wait_for_step(runs[0])
    jobs[0].cancel()
    assert jobs[2].wait(60) is State.FINISHED
    assert History.load(runs[1].path).environments == []
    assert last_end(runs[1])["status"] == "cancelled"


def test_stop_ends_the_queue_behind_the_run(target: LocalTarget) -> None:
    runs = [make_run("slow"), make_run()]
    jobs = target.submit_all(runs)
    wait_for_step(runs[0])
    assert jobs[1].status() is State.QUEUED
    jobs[0].stop()
    assert [job.wait(60) for job in jobs] == [State.INTERRUPTED, State.INTERRUPTED]
    assert History.load(runs[1].path).environments == []


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
