"""MLflow's own server, in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest


class Server:
    """An MLflow server on its own sqlite file, which can be killed and started again."""

    def __init__(self, folder: Path, database: Path) -> None:
        folder.mkdir()
        self.folder, self.database = folder, Path(shutil.copy(database, folder / "server.db"))
        self.port = self.free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def free_port() -> int:
        """Return a port of loopback on which nobody listens."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return int(free.getsockname()[1])

    @staticmethod
    def wait(address: str, process: subprocess.Popen[bytes]) -> None:
        """Wait until a server answers."""
        for _ in range(900):
            assert process.poll() is None, "the MLflow server ended"
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=1) as answer:
                    if answer.read() == b"OK":
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        pytest.fail("the MLflow server did not start")

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        """End a server at once, with its workers: it leads a session of its own."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.database}"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.wait(self.uri, self.process)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.end(self.process)
            self.process = None
