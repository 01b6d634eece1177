"""Send a short process's answer to the client that started it, while libraries may print anything.

The last line of standard output is its answer, as JSON. A process with progress (:func:`converse`) reads a request of
one line from standard input, which stays open: when it ends, the client is gone and the process exits. Output lines are
``{"kind": "progress", "what": ..., "done": passes, "total": passes}``, and finally ``{"kind": "result", "content":
...}`` or ``{"kind": "error", "text": ..., "code": exit code}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping

from sparsebp_cli.errors import SparseBPError


def answer(make: Callable[[], Mapping[str, object]]) -> int:
    """Print what ``make`` returns, or ``{"error": text, "code": exit code}``, and return the exit code."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)  # redirect prints of libraries, because standard output carries the result
        try:
            result, code = dict(make()), 0
        except Exception as error:
            from sparsebp_cli.worker.ending import describe_failure

            if not isinstance(error, SparseBPError):
                traceback.print_exc()
            text, code = describe_failure(error)
            result = {"error": text, "code": code}
        print(json.dumps(result), file=channel, flush=True)
    return code


def converse(make: Callable[[str, Callable[[str, int, int], None]], Mapping[str, object]]) -> int:
    """Answer a request, and return the exit code. ``make`` gets the request, and a function that reports progress: what
    it does, and the numbers of finished and of all passes."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)

        def send(kind: str, **values: object) -> None:
            print(json.dumps({"kind": kind} | values), file=channel, flush=True)

        try:
            request = sys.stdin.readline()
            # Start after reading the request, because both read the same input.
            threading.Thread(target=_end_with_input, daemon=True).start()
            found = make(request, lambda what, done, total: send("progress", what=what, done=done, total=total))
        except Exception as error:
            from sparsebp_cli.worker.ending import describe_failure

            if not isinstance(error, SparseBPError):
                traceback.print_exc()
            text, code = describe_failure(error)
            send("error", text=text, code=code)
            return code
        send("result", content=found)
    return 0


def _end_with_input() -> None:
    # The input ends when the client ends, even if it was killed: then nobody reads the answer any more.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
