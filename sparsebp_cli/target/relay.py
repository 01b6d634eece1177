"""Runs beside the worker inside a pod, where nothing can be copied in before it starts or out after it ended.

    python -m sparsebp_cli.target.relay WORKER_MODULE RUN_FOLDER HOLD_SECONDS

It waits until the run's folder was delivered (``.go``), starts the worker, passes its output on, and stays until
everything was fetched (``.fetched``) or its patience ends. ``.state`` says how far it is: waiting, working, or over and
the exit code. A pod that takes another one's place on a lasting volume finds the folder as it was left, and goes on by
itself.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.2


class Relay:
    """One worker in a pod."""

    def __init__(self, module: str, folder: Path) -> None:
        """Prepare.

        Args:
            module: The worker.
            folder: The run's folder.
        """
        self._module, self._folder = module, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, hold_seconds: float) -> int:
        """Wait, work, and wait to be fetched.

        Args:
            hold_seconds: How long the results stay here, unless they are fetched before.

        Returns:
            The worker's exit code, as a shell gives it.
        """
        signal.signal(signal.SIGTERM, self._hand_on)
        self._tell("waiting")
        while not self._exists(".go"):
            if self._asked:
                return 128 + self._asked
            time.sleep(POLL_SECONDS)
        (self._folder / ".fetched").unlink(missing_ok=True)
        code = self._work()
        self._tell(f"over {code}")
        deadline = time.monotonic() + hold_seconds
        while not self._asked and not self._exists(".fetched") and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return code

    def _work(self) -> int:
        self._tell("working")
        command = [sys.executable, "-P", "-m", self._module, str(self._folder / "plan.json")]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        (self._folder / ".pid").write_text(str(self._process.pid), encoding="utf-8")
        if self._asked:
            self._process.send_signal(self._asked)
        assert self._process.stdout is not None
        with (self._folder / "worker.log").open("ab", buffering=0) as log:
            for line in self._process.stdout:
                log.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self._asked = number
        if self._process is not None:
            self._process.send_signal(number)

    def _exists(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _tell(self, state: str) -> None:
        part = self._folder / ".state.part"
        part.write_text(state, encoding="utf-8")
        part.replace(self._folder / ".state")


if __name__ == "__main__":
    sys.exit(Relay(sys.argv[1], Path(sys.argv[2])).run(float(sys.argv[3])))
