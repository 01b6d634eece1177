"""The start of a process that outlives the client: its report is awaited, and never the end of an output."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sparsebp_cli.errors import RunBusyError, RunFailedError, UnreachableError
from sparsebp_cli.run import RunFolder, State
from sparsebp_cli.target import launch
from sparsebp_cli.target.launch import start_process
from sparsebp_cli.target.tool import Tool, always

from ..cli.conftest import Cli, Write, call, write_recipe
from .conftest import last_end, make_run, until

__all__ = ["call", "write_recipe"]  # fixtures of the command line's tests

HOLDER = """
import os, sys, subprocess, time
from pathlib import Path
from sparsebp_cli.errors import RunBusyError
from sparsebp_cli.target.launch import detach, report_start
print("a library says hello")
detach()
holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # has this output too
Path(sys.argv[-1], "holder").write_text(str(holder.pid))
"""
ENDS = {
    "reports": ("report_start()\ntime.sleep(600)\n", None, ""),
    "fails": ("report_start(RunBusyError('somebody is here'))\n", RunBusyError, "somebody is here"),
    "dies": ("print('the last words', flush=True)\nos._exit(1)\n", RunFailedError, "the last words"),
    "dies silently": ("os._exit(1)\n", RunFailedError, "hello"),
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep))
    return tmp_path / "starting.py"


@pytest.mark.parametrize("end", ENDS)
def test_a_child_that_holds_the_output_open_keeps_no_client(module: Path, end: str) -> None:
    code, kind, text = ENDS[end]
    module.write_text(HOLDER + code)
    run = make_run()
    try:
        if kind is None:
            start_process("starting", [], [run])
        else:
            with pytest.raises(kind, match=text):
                start_process("starting", [], [run])
            assert run.state() is (State.QUEUED if kind is RunBusyError else State.FAILED)
            if kind is not RunBusyError:
                assert text in str(last_end(run)["text"])
        holder = psutil.Process(int((run.path / "holder").read_text()))
        assert holder.is_running()  # so the output has not ended
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if str(run.path) in (process.info["cmdline"] or ()):
                process.kill()
        os.kill(int((run.path / "holder").read_text()), signal.SIGKILL)


def test_a_process_that_reports_piece_by_piece_outlives_the_answer(module: Path) -> None:
    """Without a buffer, as with PYTHONUNBUFFERED, a line may come in two pieces: the second met a closed pipe."""
    code = """
import os, sys, time
from pathlib import Path
for piece in (b'{"error": "", "text": ""}', b"\\n"):
    time.sleep(0.3)
    os.write(1, piece)
Path(sys.argv[-1], "alive").touch()
"""
    module.write_text(code)
    run = make_run()
    start_process("starting", [], [run])
    assert (run.path / "alive").exists()


def test_a_watcher_whose_client_is_gone_goes_on(module: Path) -> None:
    code = """
import sys
from pathlib import Path
from sparsebp_cli.target.launch import report_start
report_start()
Path(sys.argv[-1]).touch()
"""
    module.write_text(code)
    client = subprocess.Popen([sys.executable, str(module), str(module.parent / "on")], stdout=subprocess.PIPE)
    assert client.stdout is not None
    client.stdout.close()
    assert client.wait(60) == 0
    assert (module.parent / "on").exists()


def test_a_command_that_leaves_a_child_with_its_output_is_answered_at_once() -> None:
    tool = Tool("here", always, timeout_seconds=300.0)
    answer = tool.run(["sh", "-c", "sleep 301 & echo $!; echo no >&2"])
    child = psutil.Process(int(answer.text))
    assert child.is_running()
    assert answer.problem == "no"
    child.kill()


def test_a_command_that_takes_too_long_is_ended_with_its_children() -> None:
    tool = Tool("here", always, timeout_seconds=0.5)
    before = {process.pid for process in psutil.process_iter()}
    with pytest.raises(UnreachableError, match=r"took longer than 0\.5 s"):
        tool.run(["sh", "-c", "sleep 303 & sleep 303"])
    time.sleep(0.2)
    new = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert [process for process in new if "303" in (process.info["cmdline"] or ())] == []


def test_a_command_that_never_reads_its_input_is_ended_at_its_limit() -> None:
    tool = Tool("here", always, timeout_seconds=0.5)
    with pytest.raises(UnreachableError, match=r"took longer than 0\.5 s"):
        tool.run(["sleep", "305"], given=b"x" * (1 << 20))


@pytest.mark.parametrize("size", [0, 3, 200_000])
@pytest.mark.parametrize("line", ["sleep 0.3; cat", "cat; sleep 0.3", "exec 2>&-; sleep 0.3; head -c 3; exit 3"])
def test_a_command_with_input_may_answer_after_many_looks(
    monkeypatch: pytest.MonkeyPatch, line: str, size: int
) -> None:
    monkeypatch.setattr("sparsebp_cli.target.tool.LOOK_SECONDS", 0.01)
    given = b"a" * size
    answer = Tool("here", always).run(["sh", "-c", line], given=given)
    assert answer.out == (given[:3] if "head" in line else given)
    assert answer.code == (3 if "head" in line else 0)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_by_doctor_and_before_a_run(
    call: Cli, write_recipe: Write, home_folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    done = call("run", write_recipe())
    assert done.returncode == 100
    assert done.stderr.startswith(f"error: {home_folder}/runs: the file system ")
    assert "set SPARSEBP_HOME to a local disk" in done.stderr
    assert [path.name for path in (home_folder / "runs").iterdir()] == []
    done = call("doctor", "-o", "json")
    assert done.returncode == 1
    assert "set SPARSEBP_HOME to a local disk" in done.stdout


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # it is left so
def test_a_start_that_is_never_reported_is_given_up_and_left_at_work(
    call: Cli, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(launch, "START_SECONDS", 0.5)
    monkeypatch.setattr(launch, "REPORT_SECONDS", 0.1)
    run = make_run()
    said = refuse_start(run)
    found = re.match(r"process (\d+), which starts the run, has reported nothing for .*`sparsebp runs` shows", said)
    assert found, said
    process = psutil.Process(int(found[1]))
    assert process.is_running()
    assert run.run_id in call("runs").stdout
    process.kill()
    process.wait()
    gc.collect()  # while the warning above is left out


def refuse_start(run: RunFolder) -> str:
    """Return what is said of a start that is given up."""
    with pytest.raises(UnreachableError) as failed:
        start_process("starting", [], [run])
    return str(failed.value)


@pytest.mark.parametrize("name", ["journal.jsonl", "worker.log", "watcher.log"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_the_place_of_one_keeps_no_client(
    name: str, make: Callable[[Path], None], no_process_left: None
) -> None:
    """Opening a pipe to write waits for its reader."""
    run, words = make_run(), ["--worker", "sparsebp_cli.testing.worker"]
    make(run.path / name)
    if name == "watcher.log":  # nobody reads it but who looks for an error
        start_process("sparsebp_cli.target.watcher", words, [run])
        until(lambda: run.state() is State.FINISHED)
    else:
        with pytest.raises(RunFailedError, match=f"{name} is not a regular file$"):
            start_process("sparsebp_cli.target.watcher", words, [run])
        # The reason is in the journal, unless that is what cannot be written.
        assert run.state() is (State.QUEUED if name == "journal.jsonl" else State.FAILED)
