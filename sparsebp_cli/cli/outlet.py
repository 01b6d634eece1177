"""Protect commands from failing output: standard streams may be closed pipes, or files on a full disk.

What a command does, such as following a run, matters more than its output. So it continues without output: silently if
the pipe was closed, as by `| head`, otherwise with one line and another exit code.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast

HUNG_UP = {errno.EPIPE, errno.EIO, errno.ESHUTDOWN}  # the reader has gone, or the terminal was closed


class _Outlet:
    """A stream that drops what it cannot write. ``problem`` is the first error by which output was lost."""

    def __init__(self, stream: TextIO, *, tells: bool) -> None:
        self._stream, self._tells = stream, tells
        self._is_dead = False
        self.problem: OSError | None = None

    def write(self, text: str) -> int:
        if not self._is_dead:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._is_dead:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        self._is_dead = True
        with suppress(OSError, ValueError):  # buffered text is written at exit, and would fail again
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        if error.errno in HUNG_UP:
            return
        self.problem = error
        if self._tells:
            text = (
                f"the output cannot be written any more ({error.strerror}): further output is lost; the command goes on"
            )
            print(f"warning: {text}", file=sys.stderr, flush=True)


class Outlets:
    """A context in which the standard streams cannot end a command."""

    def __enter__(self) -> Self:
        self._before = sys.stdout, sys.stderr
        with suppress(OSError):  # a file that is opened later must not become one of the standard streams
            while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
                pass
            os.close(null)
        for stream in self._before:
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal that cannot encode ± shows a question mark instead
        self._null = Path(os.devnull).open("w", encoding="utf-8")
        out, err = (stream or self._null for stream in self._before)
        self._out = _Outlet(out, tells=True)
        sys.stdout, sys.stderr = cast("TextIO", self._out), cast("TextIO", _Outlet(err, tells=False))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = self._before
        self._null.close()
        if self._out.problem is not None and (error is None or (isinstance(error, SystemExit) and not error.code)):
            raise SystemExit(100)
