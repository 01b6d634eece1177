"""A disk that fails at work: the system answers a worker's writes, waits and renames with an error, once or for good.

`strace` puts the error in the place of the call's answer, so nothing in the worker knows that it is tested.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from sparsebp_cli.run import History, RunFolder, State, manifest
from tests.chaos.kill import difference, outcome
from tests.worker.conftest import start, work

pytestmark = [
    pytest.mark.promise("R38"),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]
SHORT: dict[str, Any] = {
    "training": {"max_steps": 16},
    "measure": {"eval_every": 8, "probe_every": None},
    "checkpoint": {"every": 2},
}
CALLS = ("fsync", "write", "rename")
ERRORS = {"EIO": "the disk reports a fault", "EROFS": "the file system is read-only", "ENOSPC": "the disk is full"}


def break_disk(pid: int, call: str, error: str, when: str) -> subprocess.Popen[bytes]:
    """Let calls of a process fail: ``when`` is the number of the first, with + also all later ones."""
    words = [
        "strace",
        "-f",
        "-qq",
        "-o",
        os.devnull,
        "-e",
        f"trace={call}",
        "-e",
        f"inject={call}:error={error}:when={when}",
    ]
    return subprocess.Popen([*words, "-p", str(pid)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def train_on_bad_disk(run: RunFolder, call: str, error: str, chance: random.Random) -> int | None:
    """Train, and break the disk after a random number of steps; return the worker's exit code."""
    process, journal = start(run), run.path / "journal.jsonl"
    steps, when = chance.randrange(10), f"{chance.randrange(1, 6)}{chance.choice(['', '+'])}"
    while process.is_alive() and (not journal.exists() or journal.read_bytes().count(b'"train/loss"') <= steps):
        time.sleep(0.002)
    tracer = break_disk(process.pid, call, error, when)
    process.join()
    tracer.wait()
    code: int | None = process.exitcode
    return code


def try_disk(run: RunFolder, call: str, error: str, chance: random.Random) -> bool:
    """Train on a disk that fails, and assert what must hold then; return whether the run was stopped by it."""
    code = train_on_bad_disk(run, call, error, chance)
    said = run.log_file.read_text(errors="replace")
    assert "Traceback" not in said
    for checkpoint in (run.path / "checkpoints").glob("step-*"):
        assert manifest.find_damage(checkpoint) == ""
    if code == 0:
        assert run.state() is State.FINISHED
        return False
    assert run.state() in {State.FAILED, State.INTERRUPTED}
    told = said + "".join(str(end["text"]) for end in History.load(run.path).ends)
    assert ERRORS[error] in told or call == "write"  # of which the worker's last words are one
    return True


def try_disks(prepare: Callable[[], RunFolder], trials: int, seed: int) -> int:
    """Train so many runs on disks that fail, and again on one that does not; return how many were stopped."""
    straight, chance, stopped = prepare(), random.Random(seed), 0
    assert work(straight) == 0
    expected = outcome(straight)
    for number in range(trials):
        run = prepare()
        stopped += try_disk(run, CALLS[number % len(CALLS)], chance.choice(sorted(ERRORS)), chance)
        assert work(run) == 0
        assert not difference(expected, outcome(run))
        shutil.rmtree(run.path)
    return stopped


def test_a_disk_that_fails_stops_the_run_in_one_line_and_it_resumes_alike(
    tiny_recipe, prepared, record_property
) -> None:
    assert try_disks(lambda: prepared(tiny_recipe(**SHORT)), 3, 0) > 0
    record_property("trials", 3)


@pytest.mark.chaos
@pytest.mark.timeout(3000)  # of a busy machine, too
def test_disks_that_fail_at_any_call_lose_nothing(tiny_recipe, prepared, record_property) -> None:
    trials = 30
    stopped = try_disks(lambda: prepared(tiny_recipe(**SHORT)), trials, 1)
    record_property("trials", trials)
    record_property("of which", ("stopped by it", stopped))
    assert stopped >= trials // 4
