"""Supervise the worker inside a pod, because files cannot be copied in before a pod starts or out after it ended.

    python -m sparsebp_cli.target.relay WORKER_MODULE RUN_FOLDER HOLD_SECONDS

The relay waits for the run's folder (``.go``), starts the worker, and copies its output to the log and to its own
output. It stays until the results were fetched (``.fetched``) or the hold time is over. ``.state`` holds ``waiting``,
``working``, or ``over`` and the exit code. A replacement pod on a persistent volume finds these files and continues by
itself. With several nodes each pod has a relay, and only the first node's relay writes files. If another node is lost,
each relay restarts its worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from sparsebp_cli.run import durable, interpreter
from sparsebp_cli.run.budget import open_to_append
from sparsebp_cli.target.engine import LOST_CODE, MOST_RESTARTS

POLL_SECONDS = 0.2


class Relay:
    """Supervises one worker in a pod."""

    def __init__(self, module: str, folder: Path) -> None:
        self._module, self._folder = module, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._signal = 0
        self._is_first = os.environ.get("SPARSEBP_NODE", "0") == "0"
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, hold_seconds: float) -> int:
        """Wait for the folder, run the worker, and hold the results. Return the worker's exit code as shells do."""
        signal.signal(signal.SIGTERM, self._forward_signal)
        self._write_state("waiting")
        while not self._exists(".go"):
            if self._signal:
                return 128 + self._signal
            time.sleep(POLL_SECONDS)
        if self._is_first:
            # It exists if a run on a claim was fetched earlier and is now resumed.
            (self._folder / ".fetched").unlink(missing_ok=True)
        for _ in range(1 + MOST_RESTARTS):
            code = self._work()
            if code != LOST_CODE or self._signal:
                break
        self._write_state(f"over {code}")
        deadline = time.monotonic() + hold_seconds
        while not self._signal and not self._exists(".fetched") and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return code

    def _work(self) -> int:
        self._write_state("working")
        command = interpreter.command("-m", self._module, str(self._folder / "plan.json"))
        self._process = subprocess.Popen(
            command, env=interpreter.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if self._is_first:
            durable.write_file(self._folder / ".pid", str(self._process.pid))
        # A signal may have arrived before the process existed.
        if self._signal:
            self._process.send_signal(self._signal)
        assert self._process.stdout is not None
        log_file = self._folder / "worker.log"
        with open_to_append(log_file) if self._is_first else Path(os.devnull).open("ab", buffering=0) as log:
            for line in self._process.stdout:
                log.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _forward_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        if self._process is not None:
            self._process.send_signal(number)

    def _exists(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _write_state(self, state: str) -> None:
        if not self._is_first:
            return
        durable.write_file(self._folder / ".state", state)


if __name__ == "__main__":
    sys.exit(Relay(sys.argv[1], Path(sys.argv[2])).run(float(sys.argv[3])))
