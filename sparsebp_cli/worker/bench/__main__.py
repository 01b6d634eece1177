"""``python -m sparsebp_cli.worker.bench``: a request on standard input, lines of JSON on standard output.

The request is one line. Standard input stays open; when it ends, the client is gone and this process exits. Lines out:
``{"kind": "progress", "what": ..., "done": passes, "total": passes}``, and finally ``{"kind": "result",
"content": ...}`` or ``{"kind": "error", "text": ..., "code": exit code}``. Output of libraries goes to standard error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback

from sparsebp_cli.worker import wait_briefly

wait_briefly()


def main() -> int:
    """Measure the request and return the exit code."""
    from sparsebp_cli.bench import Request
    from sparsebp_cli.errors import SparseBPError

    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)

        def send(kind: str, **values: object) -> None:
            print(json.dumps({"kind": kind} | values), file=channel, flush=True)

        try:
            request = Request.model_validate_json(sys.stdin.readline())
            threading.Thread(target=_end_with_input, daemon=True).start()
            from sparsebp_cli.worker.bench.measure import measure

            found = measure(request, lambda what, done, total: send("progress", what=what, done=done, total=total))
        except Exception as error:
            from sparsebp_cli.worker.ending import describe_failure

            if not isinstance(error, SparseBPError):
                traceback.print_exc()
            text, code = describe_failure(error)
            send("error", text=text, code=code)
            return code
        send("result", content=found.model_dump(mode="json"))
    return 0


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
