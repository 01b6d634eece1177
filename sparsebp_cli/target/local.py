"""The target ``local``: a worker process on this machine, and a local runner process that supervises it."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import final

import psutil

from sparsebp_cli.errors import RunBusyError
from sparsebp_cli.recipe.schema import TargetOptions
from sparsebp_cli.run import RunFolder, State, durable, home, interpreter
from sparsebp_cli.target.contract import CheckResult, Job, Target
from sparsebp_cli.target.end_record import write_end_record
from sparsebp_cli.target.launch import POLL_SECONDS, Launch, RunHandle, find_worker, start_process, wait_for_last_upload

LITTLE_SPACE = 5e9
WATCHER_SECONDS = 5.0  # for recording how a worker ended, after the grace time of a cancellation
SECONDS_FOR_GPUS = 20.0  # for listing them


@final
class LocalJob(RunHandle):
    """A job on this machine."""

    def stop(self) -> None:
        # Signal the local runner, which also holds back the runs waiting behind this one.
        launch = Launch.load(self._run)
        if process := (launch and launch.watcher(self._run)) or find_worker(self._run):
            _signal(process, signal.SIGINT)

    def kill(self) -> None:
        if process := find_worker(self._run):
            _signal(process, signal.SIGKILL)

    def cancel(self, grace_seconds: float = 30.0) -> State:
        if self.status().over:
            return self.status()
        # Before any signal, so that the process that writes the end record finds it.
        durable.write_file(self._run.cancel_file, "")
        deadline, signalled = time.monotonic() + grace_seconds, None
        while (worker := self._worker()) is not None or not self.status().over:
            # The local runner may be starting a worker right now, so signal each worker that appears.
            if worker is not None and worker != signalled:
                _signal(worker, signal.SIGTERM)
                signalled = worker
            elif worker is not None and time.monotonic() > deadline:
                _signal(worker, signal.SIGKILL)
            elif worker is None and time.monotonic() > deadline:
                self._end_watcher(is_last=time.monotonic() > deadline + WATCHER_SECONDS)
            time.sleep(POLL_SECONDS)
        self._write_missing_end()
        return self.status()

    def fetch(self) -> Path:
        return self._run.path

    def _worker(self) -> psutil.Process | None:
        return find_worker(self._run)

    def _end_watcher(self, *, is_last: bool) -> None:
        """Wake a suspended local runner whose worker is gone, so that it records the end. With ``is_last``, kill it
        instead, because it hangs. Runs waiting behind this one are then interrupted; it would not have started them."""
        launch = Launch.load(self._run)
        if process := launch and launch.watcher(self._run):
            _signal(process, signal.SIGKILL if is_last else signal.SIGCONT)

    def _write_missing_end(self) -> None:
        """Write the end record that a killed local runner did not write."""
        try:
            lock = self._run.lock("target")
        except RunBusyError:
            return
        launch = Launch.load(self._run)
        with lock:
            write_end_record(self._run, None, after_attempt=launch.after_attempt if launch else 0)


class LocalTarget(Target):
    """This machine. Derive from this class to add options, whose ``env`` reaches the worker, and checks."""

    options_class = TargetOptions
    worker_module: str

    def __init__(self, options: TargetOptions | None = None) -> None:
        """Store the options. None means the default options."""
        self.worker_module = (options or TargetOptions()).worker

    @final  # the local runner starts a worker by this command, whatever the class
    def command(self, run: RunFolder) -> list[str]:
        return interpreter.command("-m", self.worker_module, str(run.plan_file))

    def submit_all(self, runs: Sequence[RunFolder], *, max_parallel: int = 1) -> list[Job]:
        for run in runs:
            wait_for_last_upload(run)
            if run.is_locked("worker") or run.is_locked("target"):
                raise RunBusyError(f"run {run.run_id} is {run.state()}: another process is working on it")
        options = ["--worker", self.worker_module, "--max-parallel", str(max_parallel)]
        start_process("sparsebp_cli.target.watcher", options, runs)
        return [self.reattach(run) for run in runs]

    def reattach(self, run: RunFolder) -> Job:
        return LocalJob(run)

    def check(self) -> Iterator[CheckResult]:
        yield CheckResult("ok", "python", f"{platform.python_version()}, sparsebp {version('sparsebp')}")
        yield CheckResult("ok", "GPUs", ", ".join(list_gpus()) or "none")
        free = shutil.disk_usage(next(f for f in [home(), *home().parents] if f.exists())).free
        yield CheckResult("ok" if free > LITTLE_SPACE else "warn", "disk", f"{free / 1e9:.0f} GB free for runs")


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it ended at this moment


def list_gpus() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists; empty if it is not installed."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=SECONDS_FOR_GPUS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def share_gpus(num_shares: int) -> list[dict[str, str]]:
    """Return environments that divide this machine's GPUs between ``num_shares`` simultaneous workers. Each mapping
    holds ``CUDA_VISIBLE_DEVICES``; it is empty for a single worker or without GPUs."""
    if num_shares == 1:
        return [{}]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(number) for number in range(len(list_gpus()))]
    if not devices:
        return [{} for _ in range(num_shares)]
    # With more workers than GPUs, some workers share one.
    shares = [devices[number::num_shares] or [devices[number % len(devices)]] for number in range(num_shares)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]
