"""Start a worker process that measures, show its progress, and end it on a signal."""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from typing import IO, Any, Self

import typer
from rich.text import Text

from sparsebp_cli.cli.interrupt import Interrupts
from sparsebp_cli.cli.quantity import show_clock
from sparsebp_cli.cli.screen import console, print_line
from sparsebp_cli.errors import RunFailedError, UsageError
from sparsebp_cli.run import home, interpreter

SECONDS_BETWEEN_LINES = 10.0
SECONDS_TO_END = 5.0


def measure_apart(module: str, request: str) -> dict[str, Any]:
    """Run a module, given by its full name, in a separate process with a one-line request, and return its result. Raise
    ``UsageError`` if model or data cannot be loaded, ``RunFailedError`` if the process failed, and ``typer.Exit`` after
    Ctrl-C (130) or SIGTERM (143)."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors, Interrupts() as interrupts:
        process = subprocess.Popen(
            interpreter.command("-m", module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=interpreter.worker_environment({"SPARSEBP_HOME": str(home())}),  # relative ones are relative to here
            text=True,
            start_new_session=True,  # Ctrl-C reaches only this process
        )
        try:
            assert process.stdin is not None
            # A process that has already ended is reported below.
            with suppress(BrokenPipeError):
                process.stdin.write(request + "\n")
                process.stdin.flush()
            end = _follow(process, interrupts)
        finally:
            _end(process)
        if end is None and interrupts.exit_code:
            print_line("interrupted: nothing was written", stderr=True)
            raise typer.Exit(interrupts.exit_code)
        if end is None:
            raise RunFailedError(f"measuring failed with exit code {process.returncode}: {_last_line(errors)}")
    if end["kind"] == "error":
        raise UsageError(end["text"]) if end["code"] == UsageError.exit_code else RunFailedError(end["text"])
    content: dict[str, Any] = end["content"]
    return content


def _follow(process: subprocess.Popen[str], interrupts: Interrupts) -> dict[str, Any] | None:
    """Show progress until the last record, and return it; None if there is none."""
    records: queue.Queue[dict[str, Any] | None] = queue.Queue()
    # Read in a thread: otherwise a recorded signal would wait as long as the pipe is silent.
    threading.Thread(target=_read, args=(process, records), daemon=True).start()
    with _Display() as display:
        while not interrupts.received:
            try:
                record = records.get(timeout=0.1)
            except queue.Empty:
                continue
            if record is None or record["kind"] != "progress":
                return record
            display.add(record["what"], record["done"], record["total"])
    return None


def _read(process: subprocess.Popen[str], records: queue.Queue[dict[str, Any] | None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            records.put(json.loads(line))
    records.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    """End the process: close its input, then terminate it, then kill it."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    for end in (process.terminate, process.kill):
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            end()
    process.wait()


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    lines = [line.strip() for line in file if line.strip()]
    return lines[-1] if lines else "no output"


class _Display:
    """A line with a spinner in a terminal, else a line every few seconds; on standard error, away from the result."""

    def __init__(self) -> None:
        screen = console(stderr=True)
        self._status = screen.status(Text("starting")) if screen.is_terminal else None
        self._start, self._shown = time.monotonic(), float("-inf")
        self._first_done: int | None = None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def add(self, what: str, done: int, total: int) -> None:
        """Show how far the process is."""
        now = time.monotonic()
        if done and self._first_done is None:
            self._first_done, self._start = done, now
        left = ""
        if self._first_done is not None and done > self._first_done:
            seconds = (now - self._start) / (done - self._first_done) * (total - done)
            left = f"{show_clock(seconds)} left"
        text = "  ".join(part for part in (f"pass {done} of {total}" if total else "", what, left) if part)
        if self._status is not None:
            self._status.update(Text(text))
        elif now - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = now
            print_line(text, stderr=True)
