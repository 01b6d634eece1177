"""Run the command-line tools that reach a target, and distinguish refusals from broken connections.

If the target itself refuses a command, the connection works. Any other failure (no connection, an unknown host key, a
tool that hangs) raises :class:`UnreachableError`, also in doubt. So a broken connection never makes a run fail.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any, cast

from sparsebp_cli.errors import UnreachableError, UsageError
from sparsebp_cli.policy.error_text import shorten
from sparsebp_cli.target.engine_word import explain

TIMEOUT_SECONDS = 60.0
SILENCE_SECONDS = 120.0  # without a byte before a transfer is aborted
LOOK_SECONDS = 1.0  # between two checks of how much a command has printed
MOST_ANSWERED = 1 << 26  # bytes; an event log is fetched in parts of half this size
TOO_MUCH = f"answered with more than {MOST_ANSWERED >> 20} MiB"
TAR_LAST_LINE = "Exiting with failure status due to previous errors"  # GNU tar prints it after the reason
LONGEST_PROBLEM = 300
# Keep ssh and git from prompting, in a terminal or in a window.
QUIET = {"SSH_ASKPASS_REQUIRE": "never", "GIT_TERMINAL_PROMPT": "0"}


@dataclass(frozen=True)
class CommandResult:
    """Exit code, standard output and standard error of a command."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Standard output as text, stripped."""
        return self.out.decode(errors="replace").strip()

    @property
    def problem(self) -> str:
        """The last line of standard error (of standard output if that is empty), with what to do about it."""
        errors = (self.err or self.text).rpartition("stderr=")[2]  # docker quotes the error of its ssh
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        lines = [line for line in lines if not line.endswith(TAR_LAST_LINE)] or lines
        lines = [line for line in lines if "response from daemon" in line] or lines  # docker repeats less after it
        return explain(" ".join(lines[-1:])[:LONGEST_PROBLEM]) or f"exit code {self.code}"


@dataclass(frozen=True)
class Tool:
    """Runs commands of a command-line tool, such as ``kubectl``."""

    place: str  # the target's name, for errors
    # whether the target itself refused a failed command, by exit code and standard error
    is_refusal: Callable[[int, str], bool]
    environment: tuple[tuple[str, str], ...] = ()  # added to this process's environment
    timeout_seconds: float = TIMEOUT_SECONDS  # for commands that transfer nothing

    def run(self, command: Sequence[str], *, given: bytes = b"") -> CommandResult:
        """Run a command to its end, with ``given`` as standard input. The code is not 0 if the target refused. Raise
        ``UnreachableError`` if the target was not reached or took too long, ``UsageError`` if the program is missing
        here."""
        # Use files instead of pipes. Child processes that stay, such as ssh's shared connection, would hold a pipe
        # open, and a full pipe would block the command while we wait for it.
        with TemporaryFile() as source, TemporaryFile() as out, TemporaryFile() as errors:
            source.write(given)
            source.seek(0)
            process = self._start(command, errors, out, source)
            problem = self._wait(process, lambda: _size(out) + _size(errors))
            if problem:
                _end(process)
                process.wait()
                raise UnreachableError(f"{self.place} {problem}")
            out.seek(0)
            answer = CommandResult(process.returncode, out.read(), _content(errors))
        return self._check_refusal(answer)

    def read_json(self, answer: CommandResult) -> Any:
        """Return the JSON that a command printed. Raise ``UnreachableError`` if it is not JSON: it was truncated, or
        mixed with other output, and so says nothing about the run."""
        try:
            return json.loads(answer.text)
        except ValueError:
            shown = shorten(answer.text[-200:])
            raise UnreachableError(f"{self.place} gave an unexpected answer: {shown!r}") from None

    def _wait(self, process: subprocess.Popen[bytes], num_bytes: Callable[[], int]) -> str:
        """Wait for a command to end. Return a problem if it takes or prints too much (a login shell may print for
        ever), else an empty text."""
        deadline = time.monotonic() + self.timeout_seconds
        ended = False
        while not ended:
            try:
                process.wait(min(LOOK_SECONDS, self.timeout_seconds))
                ended = True
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    return f"took longer than {self.timeout_seconds:g} s to answer"
            if num_bytes() > MOST_ANSWERED:
                return TOO_MUCH
        return ""

    @contextmanager
    def read(self, command: Sequence[str]) -> Iterator[IO[bytes]]:
        """Yield a command's standard output while it keeps printing. Raise ``UnreachableError`` if the command fails
        for any reason, or prints nothing for too long."""
        with TemporaryFile() as errors, self._start(command, errors) as process, _watched(process) as touch:
            assert process.stdout is not None
            assert process.stdin is not None
            process.stdin.close()
            yield cast("IO[bytes]", _ActivityStream(process.stdout, touch))
            while process.stdout.read(1 << 16):
                touch()
            process.wait()
            if process.returncode != 0:
                answer = CommandResult(process.returncode, b"", _content(errors))
                raise UnreachableError(f"{self.place}: a transfer broke off: {answer.problem}")

    def write(self, command: Sequence[str], feed: Callable[[IO[bytes]], None]) -> CommandResult:
        """Run a command whose standard input ``feed`` writes, while it keeps reading. Raise ``UnreachableError`` if the
        target was not reached, or the command stopped reading."""
        with TemporaryFile() as errors, self._start(command, errors) as process, _watched(process) as touch:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError, ConnectionError):  # it ended early; its exit code says why
                feed(cast("IO[bytes]", _ActivityStream(process.stdin, touch)))
            with suppress(BrokenPipeError, ConnectionError):  # data that was not written yet
                process.stdin.close()
            out = process.stdout.read(MOST_ANSWERED)
            if process.stdout.read(1):
                raise UnreachableError(f"{self.place} {TOO_MUCH}")
            process.wait()
            answer = CommandResult(process.returncode, out, _content(errors))
        return self._check_refusal(answer)

    def _start(
        self,
        command: Sequence[str],
        errors: IO[bytes],
        out: IO[bytes] | int = subprocess.PIPE,
        source: IO[bytes] | int = subprocess.PIPE,
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                list(command),
                stdin=source,
                stdout=out,
                stderr=errors,
                env={**os.environ, **QUIET, **dict(self.environment)},
                start_new_session=True,  # no terminal: ssh cannot prompt, and Ctrl-C does not reach it
            )
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be run here: {error.strerror or error}") from None

    def _check_refusal(self, answer: CommandResult) -> CommandResult:
        if answer.code != 0 and not self.is_refusal(answer.code, answer.err):
            raise UnreachableError(f"{self.place} cannot be reached: {answer.problem}")
        return answer


def always(_code: int, _errors: str) -> bool:
    """Treat every failed command as refused, because the tool is the target itself."""
    return True


def matching(pattern: re.Pattern[str]) -> Callable[[int, str], bool]:
    """Return a function that treats a failed command as refused if its standard error matches a pattern."""
    return lambda _code, errors: pattern.search(errors) is not None


class _ActivityStream:
    """A stream that calls ``touch`` at each read and write."""

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
    """Return the standard error of an ended program. It is a file, because a full pipe could block the program."""
    errors.seek(max(0, _size(errors) - MOST_ANSWERED))
    return errors.read().decode(errors="replace")


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


@contextmanager
def _watched(process: subprocess.Popen[bytes]) -> Iterator[Callable[[], None]]:
    """Kill a process that transfers nothing for a while, or whose caller raises."""
    # Use a thread, because reads and writes of pipes have no time limit.
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
    """Kill a program and its children, which would hold its pipes open."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
