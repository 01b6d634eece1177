"""Runs the command lines through which other places are reached, and tells an answer from silence.

A command that was refused by the place itself answered; anything else that goes wrong (no connection, an unknown host
key, a tool that hangs) is :class:`UnreachableError`. In doubt it is the latter: a run is never called failed because a
cable was pulled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, cast

from sparsebp_cli.errors import UnreachableError, UsageError

TIMEOUT_SECONDS = 60.0
SILENCE_SECONDS = 120.0  # of a transfer, before it is given up
TAR_ENDS = "Exiting with failure status due to previous errors"  # what GNU tar says last, after the reason
LONGEST_PROBLEM = 300
# No program that we start may ask the user for anything, not even through a window.
QUIET = {"SSH_ASKPASS_REQUIRE": "never", "GIT_TERMINAL_PROMPT": "0"}


@dataclass(frozen=True)
class Answer:
    """What a command said.

    Args:
        code: Exit code.
        out: Standard output.
        err: Standard error.
    """

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Standard output as text, without space around it."""
        return self.out.decode(errors="replace").strip()

    @property
    def problem(self) -> str:
        """The last line of standard error, or of standard output where that is empty."""
        said = (self.err or self.text).rpartition("stderr=")[2]  # docker quotes what its ssh said
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        lines = [line for line in lines if not line.endswith(TAR_ENDS)] or lines
        lines = [line for line in lines if "response from daemon" in line] or lines  # the reason, before its echo
        return " ".join(lines[-1:])[:LONGEST_PROBLEM] or f"exit code {self.code}"


@dataclass(frozen=True)
class Tool:
    """One command line.

    Args:
        place: What it reaches, for error lines.
        is_answer: Whether exit code and standard error of a failed command come from the place itself.
        environment: Beside this process's own.
        timeout_seconds: For commands that transfer nothing.
    """

    place: str
    is_answer: Callable[[int, str], bool]
    environment: tuple[tuple[str, str], ...] = ()
    timeout_seconds: float = TIMEOUT_SECONDS

    def run(self, command: Sequence[str], *, given: bytes = b"") -> Answer:
        """Run a command to its end.

        Args:
            command: Its words.
            given: Standard input.

        Returns:
            What it said; its code is not 0 when the place refused.

        Raises:
            UnreachableError: It did not get through, or took too long.
            UsageError: There is no such program here.
        """
        process = self._start(command)
        try:
            out, err = process.communicate(given, timeout=self.timeout_seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            process.communicate()
            raise UnreachableError(f"{self.place} took longer than {self.timeout_seconds:g} s to answer") from None
        return self._judge(Answer(process.returncode, out, err.decode(errors="replace")))

    @contextmanager
    def read(self, command: Sequence[str]) -> Iterator[IO[bytes]]:
        """Run a command and read what it prints, as long as it goes on printing.

        Args:
            command: Its words.

        Yields:
            Its standard output.

        Raises:
            UnreachableError: It ended with an error, whatever the reason, or fell silent.
        """
        with TemporaryFile() as said, self._start(command, said) as process, _watched(process) as touch:
            assert process.stdout is not None
            assert process.stdin is not None
            process.stdin.close()
            yield cast("IO[bytes]", _Touching(process.stdout, touch))
            while process.stdout.read(1 << 16):
                touch()
            process.wait()
            if process.returncode != 0:
                answer = Answer(process.returncode, b"", _content(said))
                raise UnreachableError(f"{self.place}: a transfer broke off: {answer.problem}")

    def write(self, command: Sequence[str], feed: Callable[[IO[bytes]], None]) -> Answer:
        """Run a command and feed it, as long as it goes on reading.

        Args:
            command: Its words.
            feed: Writes its standard input.

        Returns:
            What it said.

        Raises:
            UnreachableError: It did not get through, or stopped reading.
        """
        with TemporaryFile() as said, self._start(command, said) as process, _watched(process) as touch:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError, ConnectionError):  # it ended early; its exit code says why
                feed(cast("IO[bytes]", _Touching(process.stdin, touch)))
            with suppress(BrokenPipeError, ConnectionError):  # what was not written yet
                process.stdin.close()
            out = process.stdout.read()
            process.wait()
            answer = Answer(process.returncode, out, _content(said))
        return self._judge(answer)

    def _start(self, command: Sequence[str], errors: IO[bytes] | int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **QUIET, **dict(self.environment)},
                start_new_session=True,  # without a terminal: ssh cannot ask, and Ctrl-C is not for it
            )
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be run here: {error.strerror or error}") from None

    def _judge(self, answer: Answer) -> Answer:
        if answer.code != 0 and not self.is_answer(answer.code, answer.err):
            raise UnreachableError(f"{self.place} cannot be reached: {answer.problem}")
        return answer


class _Touching:
    """A stream that says when something went through it."""

    def __init__(self, stream: IO[bytes], touch: Callable[[], None]) -> None:
        self._stream, self._touch = stream, touch

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._touch()
        return data

    def write(self, data: bytes) -> int:
        self._stream.write(data)
        self._touch()
        return len(data)


def _content(errors: IO[bytes]) -> str:
    """Return what a program that has ended wrote there; a file, so that a talkative one does not block."""
    errors.seek(0)
    return errors.read().decode(errors="replace")


@contextmanager
def _watched(process: subprocess.Popen[bytes]) -> Iterator[Callable[[], None]]:
    """End a process that has not moved for a while, and one that its caller leaves in the middle."""
    moved, done = [time.monotonic()], threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            if time.monotonic() - moved[0] > SILENCE_SECONDS:
                _end(process)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield lambda: moved.__setitem__(0, time.monotonic())
    except BaseException:
        _end(process)
        raise
    finally:
        done.set()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and those that it started, which would keep its pipes open."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
