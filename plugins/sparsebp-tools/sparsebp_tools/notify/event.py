"""Pass events to a separate process, so that a notification neither delays nor fails the run."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from sparsebp_cli import interpreter
from sparsebp_cli.notify import settings_file
from sparsebp_cli.run import RunFolder, home

LARGEST_BYTES = 32 * 1024  # a pipe takes it at once, even without a reader
_started: list[subprocess.Popen[bytes]] = []  # kept, so that ended processes can be collected


@dataclass(frozen=True)
class Event:
    """An event to deliver; ``facts`` are plain values."""

    event: str
    facts: dict[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # the same for every attempt
    time: float = field(default_factory=time.time)  # seconds since 1970


def tell(event: str, facts: dict[str, Any]) -> None:
    """Deliver an event as the settings say, in a separate process; return at once, and raise nothing.

    Args:
        event: Name of the event, such as ``judged``: any word that the user can write under ``on``.
        facts: Plain values for JSON, without secrets.
    """
    _start(Event(event, facts))


def tell_end(run: RunFolder, exit_code: int | None, *, is_asked: bool) -> None:
    """Deliver the end of a run, like :func:`tell`; the separate process determines which event it was.

    Args:
        run: The run, which is over.
        exit_code: Exit code of its worker; None if unknown.
        is_asked: Whether a user requested the end, and so knows of it.
    """
    _start(Event("", {"folder": str(run.path), "exit_code": exit_code, "is_asked": is_asked}))


def _start(event: Event) -> None:
    with suppress(Exception):  # the run continues after any error
        if not settings_file().exists():
            return
        _started[:] = [process for process in _started if process.poll() is None]
        content = json.dumps(asdict(event), default=str).encode()
        if len(content) > LARGEST_BYTES:
            content = json.dumps(asdict(Event(event.event, {"is_cut": True}))).encode()
        process = subprocess.Popen(
            interpreter.command("-m", "sparsebp_tools.notify.deliver"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=interpreter.environment({"SPARSEBP_HOME": str(home())}),
            cwd="/",
            start_new_session=True,  # it outlives this process and ignores its Ctrl-C
        )
        _started.append(process)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(content)
