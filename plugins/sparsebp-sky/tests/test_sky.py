"""What a cloud does to a run: lost answers, lost machines, failures of the launch, silence."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from conftest import Sky, prepare, records, steps, until

from sparsebp_cli.errors import RunBusyError, RunFailedError, UnreachableError, UsageError
from sparsebp_cli.target import Phase, Plan, State

VALUE = "hf_canary_7f3a91"


def files_with(text: str, folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.slow
def test_a_launch_whose_answer_was_lost_is_found_by_its_name(sky: Sky) -> None:
    sky.tell("lose", "1")
    run, target = prepare(sky, "ok")
    job = target.submit(run)
    assert job.wait(60) is State.FINISHED
    assert sky.statuses() == ["SUCCEEDED"], "it was launched once"


@pytest.mark.slow
def test_a_launch_that_shows_up_late_never_works_beside_another(sky: Sky) -> None:
    sky.tell("lose", "1")
    sky.tell("hide")
    sky.tell("hold")
    run, target = prepare(sky)
    job = target.submit(run)
    until(lambda: len(sky.jobs()) == 2)  # the first is not listed, so it was taken for lost
    assert len({found["job_name"] for found in sky.jobs()}) == 1
    sky.forget("hide")
    until(lambda: "CANCELLED" in sky.statuses() or "CANCELLING" in sky.statuses())
    sky.forget("hold")
    until(lambda: len(steps(run)) > 3)
    assert job.cancel() is State.CANCELLED
    assert len(records(run, "attempt")) == 1
    assert steps(run) == list(range(1, len(steps(run)) + 1))
    assert sorted(sky.statuses()) == ["CANCELLED", "SUCCEEDED"]


@pytest.mark.slow
def test_a_run_whose_machine_is_taken_away_goes_on_from_the_bucket(sky: Sky) -> None:
    run, target = prepare(sky)
    job = target.submit(run)
    until(lambda: len(steps(run)) > 3)
    job.stop()
    assert job.wait(60) is State.INTERRUPTED
    checkpoint = records(run, "end")[-1]["step"]
    job = target.submit(run)
    until(lambda: len(steps(run)) > checkpoint + 3)
    sky.tell("preempt", "2")
    until(lambda: len(records(run, "attempt")) == 3)
    machines = sorted(path.name for path in (sky.folder / "jobs" / "2").glob("machine-*"))
    assert machines == ["machine-1"], "nothing is left of the first machine"
    assert job.cancel() is State.CANCELLED
    assert [attempt["from_step"] for attempt in records(run, "attempt")] == [0, checkpoint, checkpoint]
    assert [(found["recovery_count"], found["status"]) for found in sky.jobs()] == [(0, "SUCCEEDED"), (1, "SUCCEEDED")]
    # What the first machine did since its checkpoint is done again; no line of either is lost or torn.
    numbers = steps(run)
    again = numbers.index(checkpoint + 1, checkpoint + 1)
    assert numbers[:again] == list(range(1, again + 1))
    assert numbers[again:] == list(range(checkpoint + 1, checkpoint + 1 + len(numbers) - again))


@pytest.mark.slow
def test_a_machine_that_is_warned_leaves_a_checkpoint_in_the_bucket(sky: Sky) -> None:
    run, target = prepare(sky)
    job = target.submit(run)
    until(lambda: len(steps(run)) > 3)
    sky.tell("preempt", "1 warned")
    until(lambda: len(records(run, "attempt")) == 2)
    assert job.cancel() is State.CANCELLED
    begin = records(run, "attempt")[1]["from_step"]
    assert begin == records(run, "end")[0]["step"] > 3
    assert steps(run) == list(range(1, len(steps(run)) + 1)), "nothing was done twice"
    assert [(found["recovery_count"], found["status"]) for found in sky.jobs()] == [(1, "SUCCEEDED")]


@pytest.mark.slow
def test_a_server_that_is_silent_for_a_while_makes_no_run_fail(sky: Sky) -> None:
    run, target = prepare(sky)
    job = target.submit(run)
    until(lambda: len(steps(run)) > 2)
    sky.tell("down")
    until(lambda: job.status() is State.UNREACHABLE)
    assert "Could not connect" in job.warning()
    sky.forget("down")
    Path(f"{sky.bucket}.down").touch()
    until(lambda: "connection refused" in job.warning())
    Path(f"{sky.bucket}.down").unlink()
    reached = len(steps(run))
    until(lambda: len(steps(run)) > reached)
    assert job.cancel() is State.CANCELLED
    assert sky.statuses() == ["SUCCEEDED"]


@pytest.mark.slow
def test_a_run_that_waits_for_a_machine_is_cancelled_without_one(sky: Sky) -> None:
    sky.tell("hold")
    run, target = prepare(sky)
    job = target.submit(run)
    until(lambda: sky.statuses() == ["PENDING"])
    assert job.status() is State.QUEUED
    assert job.cancel() is State.CANCELLED
    assert sky.statuses() == ["CANCELLED"]
    assert list(sky.bucket.glob("*/*")) == []


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            "FAILED_NO_RESOURCE no L4 in us-east-1",
            "SkyPilot: FAILED_NO_RESOURCE: no L4 in us-east-1; see sky jobs logs 1",
        ),
        ("FAILED_SETUP", "SkyPilot: FAILED_SETUP; see sky jobs logs 1"),
        ("CANCELLED", "SkyPilot: CANCELLED, and the worker left no exit code"),
    ],
)
def test_a_job_that_ends_without_a_worker_says_why(sky: Sky, told: str, said: str) -> None:
    sky.tell("reason", told)
    run, _ = prepare(sky)
    engine = sky.engine()
    (handle,) = engine.start([run], 1)
    until(lambda: engine.status(run, handle).phase is Phase.OVER)
    status = engine.status(run, handle)
    assert (status.text, status.exit_code, status.gone) == (said, None, False)


@pytest.mark.slow
def test_setup_that_fails_ends_the_run_with_the_word_of_skypilot(sky: Sky) -> None:
    run, target = prepare(sky, setup=["echo ready", "false", "echo not reached"])
    job = target.submit(run)
    assert job.wait(60) is State.INTERRUPTED
    assert records(run, "end")[-1]["text"].startswith("SkyPilot: FAILED_SETUP: Failed to run setup")
    assert list(sky.bucket.glob("*/*")) == []


def test_a_refused_launch_fails_and_leaves_nothing(sky: Sky) -> None:
    sky.tell("refuse", "sky.exceptions.StorageBucketGetError: Bucket 'runs' does not exist.")
    run, _ = prepare(sky)
    engine = sky.engine()
    with pytest.raises(RunFailedError, match=r"refused the run: .*Bucket 'runs' does not exist"):
        engine.start([run], 1)
    assert list(sky.bucket.glob("*/*")) == []
    sky.tell("refuse", "sky.exceptions.SomethingNew: who knows")
    with pytest.raises(UnreachableError, match="who knows"):
        engine.start([run], 1)  # in doubt: it may be there


def test_of_two_machines_that_start_a_run_at_once_one_succeeds(sky: Sky, monkeypatch: pytest.MonkeyPatch) -> None:
    sky.tell("hold")
    run, _ = prepare(sky)
    engine = sky.engine()
    (first,) = engine.start([run], 1)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    with pytest.raises(RunBusyError, match="which another remote runner started"):
        engine.start([run], 1)
    until(lambda: sky.statuses() == ["PENDING", "CANCELLED"])
    assert [path.name for path in (sky.bucket / "sparsebp").iterdir()] == [first]
    assert engine.find(run) == first
    for job in engine._queue.list():
        engine._queue.cancel(job)


def test_a_job_that_vanished_is_told_and_its_folder_is_fetched(sky: Sky) -> None:
    sky.tell("hold")
    run, _ = prepare(sky)
    engine = sky.engine()
    (handle,) = engine.start([run], 1)
    engine.signal(run, handle, 9)
    until(lambda: sky.statuses() == ["CANCELLED"])
    sky.tell("hide")
    status = engine.status(run, handle)
    assert (status.text, status.gone) == ("its managed job is gone from SkyPilot", False)
    shutil.rmtree(sky.bucket / "sparsebp" / handle)
    assert engine.status(run, handle).gone
    assert engine.find(run) is None


@pytest.mark.slow
def test_the_value_of_a_secret_is_nowhere_but_in_the_workers_environment(
    sky: Sky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", VALUE)
    # A shell in the place of Python shows what the worker gets.
    python = sky.folder / "python"
    python.write_text(f'#!/bin/sh\necho "$HF_TOKEN $COLOUR" > {sky.folder}/seen\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run, target = prepare(sky, "ok", secrets=["HF_TOKEN"], env={"COLOUR": "red"}, python=str(python))
    assert target.submit(run).wait(60) is State.FINISHED
    assert (sky.folder / "seen").read_text() == f"{VALUE} red\n"
    (sky.folder / "seen").unlink()
    assert files_with(VALUE, sky.folder) == []
    assert files_with(VALUE, sky.bucket) == []
    assert files_with(VALUE, run.path) == []
    (launch,) = [call for call in sky.calls() if call.startswith("jobs launch")]
    assert "--secret HF_TOKEN" in launch


def test_a_secret_that_is_not_set_is_told_before_anything_starts(sky: Sky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    run, target = prepare(sky, secrets=["HF_TOKEN"])
    with pytest.raises(UsageError, match=r"target\.secrets: the environment variable HF_TOKEN is not set"):
        target.submit(run)
    assert sky.jobs() == []


def test_data_on_this_machine_is_refused(sky: Sky) -> None:
    run, target = prepare(sky)
    plan = run.plan_file.read_text().replace('"name": "none"', '"name": "/srv/data/x.jsonl"')
    run.plan_file.write_text(plan)
    with pytest.raises(UsageError, match=r"/srv/data/x.jsonl is on this machine; put it into a bucket: target.mounts"):
        target.submit(run)
    mounted = sky.engine(mounts={"/srv/data": "s3://sets/data"})
    mounted.check_plan(Plan.load(run.plan_file))


def test_a_check_tells_what_is_there_and_what_is_not(sky: Sky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert {result.level for result in sky.engine().check()} == {"ok"}
    found = {(result.level, result.what): result.text for result in sky.engine(secrets=["HF_TOKEN"]).check()}
    assert found["ok", "sky"] == "skypilot, version 0.14.1"
    assert found["ok", "jobs"] == "0 managed jobs, 0 of them not over"
    assert found["fail", "secrets"] == "HF_TOKEN is not set in this environment"
    sky.tell("down")
    Path(f"{sky.bucket}.down").touch()
    assert [(result.level, result.what) for result in sky.engine().check()] == [("fail", "sky"), ("fail", "bucket")]
    monkeypatch.setenv("PATH", "/nowhere")
    found = {(result.level, result.what): result.text for result in sky.engine().check()}
    assert found["fail", "sky"].startswith("sky cannot be run here")
    assert found["fail", "bucket"].startswith("rclone cannot be run here")


@pytest.mark.parametrize(
    ("printed", "jobs"),
    [
        ("[]", []),
        ("Hello\n[]\n", []),
        ('[notice] a new version\n[{"job_id": 1, "job_name": "a", "status": "RUNNING"}]\n', ["a"]),
        ('[{"job_id": null, "job_name": null, "status": null}]', []),
    ],
)
def test_a_list_of_jobs_is_found_behind_whatever_was_printed(sky: Sky, printed: str, jobs: list[str]) -> None:
    (sky.folder / "out").write_text(printed)
    program = sky.folder.parent / "bin" / "sky"
    program.write_text(f"#!/bin/sh\ncat {sky.folder}/out\n")
    assert [job.name for job in sky.engine()._queue.list()] == jobs


@pytest.mark.parametrize("printed", ["", "[notice]", "{}", "[1, 2]", "No jobs."])
def test_an_answer_without_a_list_is_silence_and_not_an_empty_list(sky: Sky, printed: str) -> None:
    (sky.folder / "out").write_text(printed)
    program = sky.folder.parent / "bin" / "sky"
    program.write_text(f"#!/bin/sh\ncat {sky.folder}/out\n")
    with pytest.raises(UnreachableError, match="printed no list of jobs"):
        sky.engine()._queue.list()


def test_a_status_of_tomorrow_is_not_taken_for_an_end(sky: Sky) -> None:
    sky.tell("reason", "HIBERNATING")
    run, _ = prepare(sky)
    engine = sky.engine()
    (handle,) = engine.start([run], 1)
    until(lambda: sky.statuses() == ["HIBERNATING"])
    with pytest.raises(UnreachableError, match="reports the status HIBERNATING"):
        engine.status(run, handle)
