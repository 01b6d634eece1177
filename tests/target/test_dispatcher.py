"""How runs elsewhere fare when their place does not answer, loses them or refuses them: shown with the fake."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparsebp_cli.errors import RunBusyError, RunFailedError, UnreachableError
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_cli.target.dispatcher import Dispatcher
from sparsebp_cli.target.engine import Phase, WorkerStatus
from sparsebp_cli.target.launch import Launch
from tests.target.fake import FakeTarget

from .conftest import last_end, make_run, until, wait_for_step

pytestmark = pytest.mark.promise("R10")


@pytest.fixture
def fake(tmp_path: Path) -> FakeTarget:
    return FakeTarget(tmp_path / "there")


def test_a_cut_line_is_unreachable_and_never_failed(fake: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebp_cli.target.dispatcher.LONGEST_PAUSE", 0.05)
    run = make_run("slow")
    job = fake.submit(run)
    wait_for_step(run)
    fake.engine.cut()
    until(lambda: job.status() is State.UNREACHABLE)
    assert not job.settled()
    assert "line is cut" in job.warning()
    fake.engine.mend()
    until(lambda: job.status() is State.RUNNING)
    assert job.cancel() is State.CANCELLED
    assert [end["status"] for end in History.load(run.path).ends] == ["interrupted", "cancelled"]


def test_a_run_that_ends_while_the_line_is_cut_is_fetched_later(
    fake: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsebp_cli.target.dispatcher.LONGEST_PAUSE", 0.05)
    run = make_run("steady", max_steps=30)
    job = fake.submit(run)
    wait_for_step(run)
    fake.engine.cut()
    until((fake.engine.there / run.run_id / "model").exists)
    assert job.status() is State.UNREACHABLE
    fake.engine.mend()
    assert job.wait(60) is State.FINISHED
    assert len(History.load(run.path).series("train/loss")) == 30
    assert "line is cut" not in job.warning()


def test_a_line_that_is_cut_for_days_is_still_tried(fake: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebp_cli.target.dispatcher.LONGEST_PAUSE", 0.0001)
    tries: list[object] = []
    status = fake.engine.status

    def count(run: RunFolder, handle: str) -> WorkerStatus:
        tries.append(None)
        return status(run, handle)

    monkeypatch.setattr(fake.engine, "status", count)
    run = make_run("slow")
    job = fake.submit(run)
    wait_for_step(run)
    fake.engine.cut()
    tries.clear()
    until(lambda: len(tries) > 1100)  # 2.0**1024 is too large for a float
    fake.engine.mend()
    until(lambda: job.status() is State.RUNNING)
    assert job.cancel() is State.CANCELLED


def test_a_cancellation_tries_a_silent_target_at_once_and_does_not_wait_for_it(
    fake: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsebp_cli.target.dispatcher._pause_after", lambda failures: 3600.0)
    monkeypatch.setattr("sparsebp_cli.target.remote.PATIENCE_SECONDS", 3600.0)
    run = make_run("slow")
    job = fake.submit(run)
    wait_for_step(run)
    fake.engine.cut()
    until(lambda: job.status() is State.UNREACHABLE)
    asking = threading.Thread(target=job.cancel, daemon=True)
    asking.start()
    asking.join(60)
    assert not asking.is_alive()
    assert job.status() is State.UNREACHABLE
    run.cancel_file.unlink()
    fake.engine.mend()
    job.kill()  # a new request, so the target is tried again
    assert job.wait(60) is State.INTERRUPTED


def test_a_cancellation_of_a_target_that_answers_again_is_carried_out_at_once(
    fake: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsebp_cli.target.dispatcher._pause_after", lambda failures: 3600.0)
    run = make_run("slow")
    job = fake.submit(run)
    wait_for_step(run)
    fake.engine.cut()
    until(lambda: job.status() is State.UNREACHABLE)
    fake.engine.mend()
    monkeypatch.setattr("sparsebp_cli.target.remote.PATIENCE_SECONDS", 10.0)
    assert job.cancel() is State.CANCELLED


def test_a_cancellation_waits_for_a_target_that_fails_to_answer_only_once(
    fake: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("slow")
    job = fake.submit(run)
    wait_for_step(run)
    cut: list[float] = []

    def wait(seconds: float) -> None:  # the first pause of the cancellation: the line is cut, and mended later
        if not cut:
            fake.engine.cut()
            until(lambda: job.status() is State.UNREACHABLE)
            threading.Timer(1.0, fake.engine.mend).start()
        cut.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr("sparsebp_cli.target.remote.time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    run.cancel_file.unlink(missing_ok=True)
    assert job.cancel() is State.CANCELLED
    assert cut


def test_a_worker_that_is_lost_is_interrupted_with_what_was_seen_of_it(fake: FakeTarget) -> None:
    run = make_run("slow")
    job = fake.submit(run)
    wait_for_step(run, 3)
    fake.engine.lose(run)
    assert job.wait(60) is State.INTERRUPTED
    assert last_end(run)["text"] == "its worker is gone"
    assert 3 in History.load(run.path).series("train/loss")


def test_a_killed_worker_is_interrupted(fake: FakeTarget) -> None:
    run = make_run("slow")
    job = fake.submit(run)
    wait_for_step(run)
    fake.engine.kill(run)
    assert job.wait(60) is State.INTERRUPTED
    assert "SIGKILL" in str(last_end(run)["text"])


def test_nothing_is_started_at_a_place_that_does_not_answer(fake: FakeTarget) -> None:
    run = make_run()
    fake.engine.cut()
    with pytest.raises(UnreachableError):
        fake.submit(run)
    assert run.state() is State.FAILED  # no process will start it
    assert last_end(run)["text"] == "it could not be started: the fake cannot be reached: its line is cut"
    assert not run.is_locked("target")
    fake.engine.mend()
    assert fake.submit(run).wait(60) is State.FINISHED


def test_a_refusal_is_a_failure_with_its_reason(fake: FakeTarget) -> None:
    run = make_run()
    fake.engine.refusal = "there is no image sparsebp:none"
    with pytest.raises(RunFailedError, match="no image"):
        fake.submit(run)
    assert run.state() is State.FAILED
    assert last_end(run)["text"] == "there is no image sparsebp:none"


def test_a_refused_resume_leaves_the_run_as_it_was(fake: FakeTarget) -> None:
    run = make_run("slow")
    job = fake.submit(run)
    wait_for_step(run)
    fake.engine.kill(run)
    assert job.wait(60) is State.INTERRUPTED
    ends, known = History.load(run.path).ends, run.target_file.read_text()
    fake.engine.refusal = "there is no image sparsebp:none"
    with pytest.raises(RunFailedError, match="no image"):
        fake.submit(run)
    assert run.state() is State.INTERRUPTED
    assert (History.load(run.path).ends, run.target_file.read_text()) == (ends, known)
    assert not run.is_locked("target")
    fake.engine.refusal = ""
    resumed = fake.submit(run)
    until(lambda: resumed.status() is State.RUNNING)
    assert resumed.cancel() is State.CANCELLED


def test_a_start_of_which_nothing_was_heard_is_looked_for_and_not_repeated(
    fake: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsebp_cli.target.dispatcher.LONGEST_PAUSE", 0.05)
    run, start, starts = make_run("slow"), fake.engine.start, []

    def start_and_lose_the_answer(*arguments: object) -> list[str]:
        starts.append(start(*arguments))  # type: ignore[arg-type]
        raise UnreachableError("the connection broke")

    monkeypatch.setattr(fake.engine, "start", start_and_lose_the_answer)
    job = fake.submit(run)
    wait_for_step(run)
    assert len(starts) == 1
    assert job.cancel() is State.CANCELLED


def test_a_start_with_an_unforeseen_error_is_looked_for_before_it_has_failed(
    fake: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = fake.engine.start

    def start_and_break(*arguments: object) -> list[str]:
        start(*arguments)  # type: ignore[arg-type]
        raise ValueError("an answer that nobody can read")

    monkeypatch.setattr(fake.engine, "start", start_and_break)
    assert fake.submit(make_run()).wait(60) is State.FINISHED


def test_an_unforeseen_error_without_a_worker_fails_the_run_with_its_reason(
    fake: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object) -> list[str]:
        raise ValueError("an answer that nobody can read")

    monkeypatch.setattr(fake.engine, "start", break_off)
    run = make_run()
    with pytest.raises(RunFailedError, match="ValueError: an answer"):
        fake.submit(run)
    assert run.state() is State.FAILED
    assert last_end(run)["text"] == "ValueError: an answer that nobody can read"


def test_two_dispatchers_never_have_one_run(fake: FakeTarget) -> None:
    run = make_run("slow")
    job = fake.submit(run)
    with pytest.raises(RunBusyError):
        Dispatcher([run], fake.engine)
    assert job.cancel() is State.CANCELLED


def test_of_a_run_whose_dispatcher_died_nothing_is_known_until_the_next_one(fake: FakeTarget) -> None:
    run = make_run("slow")
    dispatcher = Dispatcher([run], fake.engine)
    dispatcher.begin()
    dispatcher.poll()
    dispatcher._followed[0]._lock.release()  # as the system does when a process dies
    assert run.state() is State.UNREACHABLE
    again = Dispatcher([run], fake.engine, adopt_only=True)
    again.begin()
    again.poll()
    assert run.state() is State.RUNNING
    run.cancel_file.touch()
    again.run_to_end()
    assert run.state() is State.CANCELLED
    assert len(History.load(run.path).environments) == 1


@pytest.mark.parametrize("code", [255, -9, 143, 1])
def test_a_worker_that_ended_while_its_dispatcher_was_dead_is_concluded_and_goes_on(
    fake: FakeTarget, code: int
) -> None:
    run = make_run("steady", max_steps=12)
    dispatcher = Dispatcher([run], fake.engine)
    dispatcher.begin()
    until(lambda: (dispatcher.poll(), 2 in History.load(run.path).series("train/loss"))[1])
    fake.engine.kill(run)
    worker = fake.engine._workers[run.run_id]
    assert worker.thread is not None
    worker.thread.join()
    worker.exit_code = code
    dispatcher._followed[0]._lock.release()  # the dispatcher dies, too
    assert run.state() is State.UNREACHABLE
    assert fake.submit(run).wait(60) is State.FINISHED
    history = History.load(run.path)
    assert len(history.environments) == 2
    assert [end["status"] for end in history.ends] == ["failed" if code == 1 else "interrupted", "finished"]


def test_a_dispatcher_outlives_an_error_that_nobody_foresaw(fake: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebp_cli.target.dispatcher.LONGEST_PAUSE", 0.05)
    runs = [make_run("steady", max_steps=12), make_run("steady", max_steps=12)]
    status, failed = fake.engine.status, []

    def fail_once(run: RunFolder, handle: str) -> WorkerStatus:
        if run == runs[0] and not failed:
            failed.append(run)
            raise ZeroDivisionError("a defect")
        return status(run, handle)

    monkeypatch.setattr(fake.engine, "status", fail_once)
    jobs = fake.submit_all(runs, max_parallel=2)
    assert [job.wait(60) for job in jobs] == [State.FINISHED] * 2
    assert failed


def test_a_resume_that_finds_no_line_leaves_the_run_as_unreachable_as_it_was(fake: FakeTarget) -> None:
    run = make_run()
    Launch(0, 1, sight="waiting").save(run)  # its start was not heard of
    fake.engine.cut()
    with pytest.raises(UnreachableError):
        fake.submit(run)
    assert run.state() is State.UNREACHABLE


def test_adopting_starts_nothing(fake: FakeTarget) -> None:
    run = make_run()
    Launch(0, 1, sight="unreachable").save(run)
    dispatcher = Dispatcher([run], fake.engine, adopt_only=True)
    dispatcher.begin()
    dispatcher.run_to_end()
    assert fake.engine.find(run) is None
    assert run.state() is State.INTERRUPTED


def test_stop_ends_every_run_of_the_submission(fake: FakeTarget) -> None:
    runs = [make_run("slow"), make_run("slow"), make_run()]
    jobs = fake.submit_all(runs, max_parallel=2)
    wait_for_step(runs[1])
    jobs[0].stop()
    assert [job.wait(60) for job in jobs] == [State.INTERRUPTED] * 3
    assert History.load(runs[2].path).environments == []


def test_a_stop_that_comes_while_its_run_is_polled_ends_the_others_too(
    fake: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run("slow"), make_run("slow"), make_run()]
    dispatcher = Dispatcher(runs, fake.engine, max_parallel=2, sleep=lambda _: None)
    dispatcher.begin()
    until(lambda: dispatcher.poll() or 1 in History.load(runs[1].path).series("train/loss"))
    status = fake.engine.status

    def ask(run: RunFolder, handle: str) -> WorkerStatus:
        if run is runs[0]:
            runs[0].request_file.write_text("stop")
        return status(run, handle)

    monkeypatch.setattr(fake.engine, "status", ask)
    dispatcher.run_to_end()
    assert [run.state() for run in runs] == [State.INTERRUPTED] * 3
    assert History.load(runs[2].path).environments == []


def test_a_kill_that_follows_a_stop_at_once_is_not_taken_for_the_stop(
    fake: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run("stubborn"), make_run("stubborn")]
    dispatcher = Dispatcher(runs, fake.engine, max_parallel=2, sleep=lambda _: None)
    dispatcher.begin()
    jobs = [fake.reattach(run) for run in runs]
    until(lambda: dispatcher.poll() or all(1 in History.load(run.path).series("train/loss") for run in runs))
    signal = fake.engine.signal

    def obey(run: RunFolder, handle: str, number: int) -> None:
        signal(run, handle, number)
        monkeypatch.setattr(fake.engine, "signal", signal)
        for job in jobs:  # as a second Ctrl-C that comes while the first is carried out
            job.kill()
            job.stop()

    monkeypatch.setattr(fake.engine, "signal", obey)
    jobs[0].stop()
    until(lambda: dispatcher.poll() or all(run.state().over for run in runs))
    assert [run.state() for run in runs] == [State.INTERRUPTED] * 2


def test_a_run_cancelled_before_its_turn_is_never_started(fake: FakeTarget) -> None:
    runs = [make_run("slow"), make_run("slow"), make_run()]
    jobs = fake.submit_all(runs)
    wait_for_step(runs[0])
    assert jobs[1].cancel() is State.CANCELLED
    jobs[0].cancel()
    assert jobs[2].wait(60) is State.FINISHED
    assert History.load(runs[1].path).environments == []


def test_a_disk_that_is_full_here_leaves_everything_there(fake: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebp_cli.target.dispatcher.LONGEST_PAUSE", 0.05)
    run, merge_into_run, full = make_run(), "tests.target.fake.merge_into_run", [True]
    from sparsebp_cli.target.archive import merge_into_run as really

    def sometimes(*arguments: object) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        really(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(merge_into_run, sometimes)
    job = fake.submit(run)
    until(lambda: job.status() is State.UNREACHABLE)
    assert "No space left" in job.warning()
    assert fake.engine.find(run) is not None
    full[0] = False
    assert job.wait(60) is State.FINISHED
    assert (run.path / "model").is_dir()


def test_a_run_that_cannot_note_its_problem_leaves_the_dispatcher_to_the_others(
    fake: FakeTarget, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparsebp_cli.target.dispatcher.LONGEST_PAUSE", 0.05)
    full, other, really, is_full = make_run("slow"), make_run(), Launch.save, [False]

    def save(launch: Launch, run: RunFolder) -> None:
        if is_full[0] and run == full:
            raise OSError(28, "No space left on device")
        really(launch, run)

    monkeypatch.setattr(Launch, "save", save)
    dispatcher = Dispatcher([full, other], fake.engine, max_parallel=2)
    dispatcher.begin()
    until(lambda: dispatcher.poll() or History.load(full.path).series("train/loss"))
    is_full[0] = True
    until(lambda: dispatcher.poll() or other.state() is State.FINISHED)
    assert f"{full.run_id}: " in capsys.readouterr().out
    is_full[0] = False
    fake.reattach(full).stop()
    dispatcher.run_to_end()
    assert full.state() is State.INTERRUPTED


def test_a_run_whose_folder_is_deleted_is_followed_no_more(fake: FakeTarget) -> None:
    deleted, other = make_run("slow"), make_run()
    dispatcher = Dispatcher([deleted, other], fake.engine, max_parallel=2)
    dispatcher.begin()
    until(lambda: dispatcher.poll() or History.load(deleted.path).series("train/loss"))
    shutil.rmtree(deleted.path)
    dispatcher.run_to_end()
    assert other.state() is State.FINISHED


def test_a_job_that_is_over_before_its_first_look_is_concluded_once(
    fake: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder there is gone then: another look would find nothing, and call the finished run unreachable."""
    seen: list[WorkerStatus] = []
    start, status = fake.engine.start, fake.engine.status

    def start_and_wait(runs: list[RunFolder], max_parallel: int) -> list[str]:
        handles = start(runs, max_parallel)
        for run, handle in zip(runs, handles, strict=True):
            until(lambda run=run, handle=handle: status(run, handle).phase is Phase.OVER)  # type: ignore[misc]
        return handles

    def look(run: RunFolder, handle: str) -> WorkerStatus:
        seen.append(status(run, handle))
        return seen[-1]

    monkeypatch.setattr(fake.engine, "start", start_and_wait)
    monkeypatch.setattr(fake.engine, "status", look)
    runs = [make_run("ok"), make_run("ok")]
    dispatcher = Dispatcher(runs, fake.engine, max_parallel=2)
    dispatcher.begin()
    dispatcher.run_to_end()
    assert [run.state() for run in runs] == [State.FINISHED] * 2
    assert [one.phase for one in seen] == [Phase.OVER] * 2
    launches = [Launch.load(run) for run in runs]
    assert [launch.sight for launch in launches if launch is not None] == ["over"] * 2
