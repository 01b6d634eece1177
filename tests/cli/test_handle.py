"""What keeps a grip on a run: signals, kill -9, ``logs``, ``cancel``, ``resume``."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from sparsebp_cli.run import History, RunFolder, State, list_runs
from sparsebp_cli.target.launch import Launch

from .conftest import Cli, Start, Write


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def wait_for_step(step: int = 2) -> RunFolder:
    until(lambda: list_runs() and step in History.load(list_runs()[0].path).series("train/loss"))
    return list_runs()[0]


def processes_of(run: RunFolder) -> tuple[psutil.Process, psutil.Process]:
    launch = Launch.load(run)
    assert launch is not None
    watcher, worker = launch.watcher(run), launch.worker(run)
    assert watcher is not None
    assert worker is not None
    return watcher, worker


def wait_for_step_of_oldest() -> None:
    until(lambda: len(list_runs()) == 3 and History.load(list_runs()[-1].path).series("train/loss"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_a_signal_stops_with_a_checkpoint_and_says_how_to_go_on(
    start: Start, write_recipe: Write, number: int, code: int
) -> None:
    client = start("run", write_recipe("slow"))
    run = wait_for_step()
    client.send_signal(number)
    _, errors = client.communicate(timeout=60)
    assert client.returncode == code
    assert run.state() is State.INTERRUPTED
    assert f"sparsebp resume {run.run_id}" in errors
    assert "Traceback" not in errors


def test_ctrl_c_twice_kills_a_worker_that_does_not_listen(start: Start, write_recipe: Write) -> None:
    client = start("run", write_recipe("stubborn"))
    run = wait_for_step()
    client.send_signal(signal.SIGINT)
    until(lambda: "stopping" in client.stdout.readline())  # type: ignore[union-attr]
    client.send_signal(signal.SIGINT)
    _, errors = client.communicate(timeout=60)
    assert client.returncode == 130
    assert "killed by the user" in errors
    assert run.state() is State.INTERRUPTED


def test_ctrl_c_does_not_start_the_runs_behind(start: Start, write_recipe: Write) -> None:
    client = start("run", write_recipe("slow"), "--seeds", "0-2")
    wait_for_step_of_oldest()
    client.send_signal(signal.SIGINT)
    _, errors = client.communicate(timeout=60)
    assert client.returncode == 130
    runs = list_runs()
    assert f"not started: {runs[1].run_id} {runs[0].run_id}" in errors
    until(lambda: all(run.state() is State.INTERRUPTED for run in runs))
    assert [len(History.load(run.path).environments) for run in runs] == [0, 0, 1]


def test_a_killed_client_leaves_the_run_going_and_logs_find_it(cli: Cli, start: Start, write_recipe: Write) -> None:
    client = start("run", write_recipe("slow"))
    run = wait_for_step()
    client.kill()
    client.wait()
    steps = len(History.load(run.path).series("train/loss"))
    wait_for_step(steps + 3)
    follower = start("logs", "-f", "@last")
    until(lambda: "fake worker: slow" in follower.stdout.readline())  # type: ignore[union-attr]
    assert cli("cancel", "@last").returncode == 0
    out, _ = follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert out.splitlines()[-1].startswith(f"{run.run_id}: cancelled")


def test_ctrl_c_in_logs_leaves_the_run_alone(start: Start, cli: Cli, write_recipe: Write) -> None:
    run_id = cli("run", write_recipe("slow"), "--detach").stdout.strip()
    follower = start("logs", "-f", run_id)
    until(lambda: "fake worker: slow" in follower.stdout.readline())  # type: ignore[union-attr]
    follower.send_signal(signal.SIGINT)
    _, errors = follower.communicate(timeout=60)
    assert follower.returncode == 130
    assert f"the run goes on; `sparsebp cancel {run_id}` stops it" in errors
    assert list_runs()[0].state() is State.RUNNING


def test_logs_of_a_finished_run_show_progress_and_output(cli: Cli, write_recipe: Write) -> None:
    cli("run", write_recipe())
    done = cli("logs", "@last")
    assert done.returncode == 0
    assert "step 20/30" in done.stdout
    assert "fake worker: ok from step 0" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1].endswith(": finished")


def test_logs_of_an_ended_run_need_no_plug_in_of_its_target(cli: Cli, write_recipe: Write) -> None:
    cli("run", write_recipe())
    file = list_runs()[0].plan_file
    plan = json.loads(file.read_text(encoding="utf-8"))
    plan["recipe"]["target"] = {"kind": "no-such-plug-in"}
    file.write_text(json.dumps(plan), encoding="utf-8")
    for options in ([], ["--follow"]):
        done = cli("logs", "@last", *options, real=True)
        assert (done.returncode, done.stdout.splitlines()[-1][-10:]) == (0, ": finished"), done.stderr


def test_a_killed_worker_ends_with_101_and_can_be_resumed(start: Start, cli: Cli, write_recipe: Write) -> None:
    client = start("run", write_recipe("slow"))
    run = wait_for_step()
    processes_of(run)[1].kill()
    _, errors = client.communicate(timeout=60)
    assert client.returncode == 101
    assert "killed by SIGKILL" in errors
    assert cli("resume", run.run_id, "--detach").stdout.strip() == run.run_id
    until(lambda: len(History.load(run.path).environments) == 2)


def test_a_killed_watcher_is_not_noticed_by_the_client(start: Start, write_recipe: Write) -> None:
    client = start("run", write_recipe("slow"))
    run = wait_for_step()
    processes_of(run)[0].kill()
    wait_for_step(len(History.load(run.path).series("train/loss")) + 3)
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=60)
    assert client.returncode == 130
    assert run.state() is State.INTERRUPTED


def test_cancelling_from_elsewhere_ends_the_client_with_103(start: Start, cli: Cli, write_recipe: Write) -> None:
    client = start("run", write_recipe("slow"))
    run = wait_for_step()
    assert cli("cancel", run.run_id).stdout == f"{run.run_id} cancelled\n"
    client.communicate(timeout=60)
    assert client.returncode == 103
    again = cli("cancel", run.run_id)
    assert (again.returncode, again.stdout) == (0, f"{run.run_id} is cancelled already\n")


def test_a_live_run_is_not_resumed(cli: Cli, start: Start, write_recipe: Write) -> None:
    start("run", write_recipe("slow"))
    run = wait_for_step()
    done = cli("resume", "@last")
    assert done.returncode == 101
    assert done.stderr == f"error: run {run.run_id} is running: another process is working on it\n"


def test_a_finished_run_is_not_resumed_and_that_is_no_error(cli: Cli, write_recipe: Write) -> None:
    cli("run", write_recipe())
    done = cli("resume", "@last")
    assert (done.returncode, done.stdout) == (0, f"{list_runs()[0].run_id} is finished already\n")


def test_resume_goes_on_under_the_same_id_and_shows_only_what_is_new(
    start: Start, cli: Cli, write_recipe: Write
) -> None:
    recipe = write_recipe("steady")
    client = start("run", recipe, "--set", "training.max_steps=60")
    run = wait_for_step(25)
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=60)
    done = cli("resume", run.run_id)
    assert done.returncode == 0, done.stderr
    assert [folder.run_id for folder in list_runs()] == [run.run_id]
    assert "step 60/60" in done.stdout
    assert "step 20/60" not in done.stdout
