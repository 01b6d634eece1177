"""Delivers one event, which it reads from standard input: ``python -m sparsebp_tools.notify.deliver``.

What cannot be delivered is one line in ``notify.log`` in the home of runs. It names a webhook by its host, since the
rest of an address may be a secret, and repeats no text of an error that may have address or settings in it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparsebp_cli.errors import RecipeError, UsageError
from sparsebp_cli.run import History, RunFolder, State, home
from sparsebp_tools.notify.event import Event
from sparsebp_tools.notify.settings import Notice, check_address, load_settings

DIVERGED = 3  # exit code of a worker
AGAIN = {408, 425, 429}  # answers after which the same may be accepted later; so are all from 500
LONGEST_PAUSE = 60.0
LARGEST_LOG = 1 << 20
EVENTS = {State.FINISHED: "finished", State.FAILED: "failed", State.INTERRUPTED: "interrupted"}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: it could lead elsewhere what was meant for one place."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def complete(event: Event) -> Event | None:
    """Return an event with the facts of its run, if it is the end of one; None if there is nothing to tell."""
    if event.event:
        return event
    run = RunFolder(Path(event.facts["folder"]))
    history, plan = History.load(run.path), run.read_plan()
    state = run.ended()
    name = EVENTS.get(state) if state is not None else None
    # At `checkpoint.stop_at`, as a study asks for that halves its candidates.
    is_paused = bool(history.ends) and history.ends[-1].get("cause") == "paused"
    if name is None or (state is State.INTERRUPTED and (event.facts["is_asked"] or is_paused)):
        return None
    if state is State.FAILED and event.facts["exit_code"] == DIVERGED:
        name = "diverged"
    loss = history.last("eval/loss")
    facts = {
        "run_id": run.run_id,
        "name": plan["recipe"]["name"],
        "state": str(state),
        "text": str(history.ends[-1]["text"]) if history.ends else "",
        "eval_loss": loss if loss is not None and math.isfinite(loss) else None,  # JSON has no word for others
        "folder": str(run.path),
    }
    return replace(event, event=name, facts=facts)


def main() -> None:
    """Deliver the event in every way that the settings name for it."""
    event = Event(**json.loads(sys.stdin.buffer.read()))
    try:
        told = complete(event)
        notices = [one for one in load_settings().notify if told is not None and told.event in one.on]
    except RecipeError as error:
        write_log(f"nothing is sent: {error.file}:{error.line}: {error.key}: {error.text}")
        return
    if told is None:
        return
    threads = [threading.Thread(target=deliver, args=(notice, told)) for notice in notices]
    for thread in threads:
        thread.start()


def deliver(notice: Notice, event: Event) -> bool:
    """Tell one, and return whether that was possible; write why not to the log."""
    told = {"event": event.event, "id": event.id, "time": event.time, "facts": event.facts}
    try:
        body = json.dumps(told, allow_nan=False, default=str).encode()
    except ValueError:
        write_log(f"{event.event}: has a number that JSON does not know")
        return False
    try:
        problem = _run(notice, body) if notice.command is not None else _post(notice, event, body)
    except UsageError as error:  # of a secret, which it does not contain
        problem = str(error)
    if problem:
        write_log(f"{event.event} {event.facts.get('run_id', '')}: {problem}")
    return not problem


def _run(notice: Notice, body: bytes) -> str:
    assert notice.command is not None
    program = notice.command[0]
    try:
        done = subprocess.run(
            notice.command,
            input=body,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=notice.timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{program} took more than {notice.timeout_seconds:g} s, and was ended"
    except OSError as error:
        return f"{program} cannot be started: {error.strerror}"
    return f"{program} ended with {done.returncode}" if done.returncode else ""


def _post(notice: Notice, event: Event, body: bytes) -> str:
    """Try until it is accepted, refused, or the attempts are spent; return the problem, empty if it was accepted."""
    assert notice.webhook is not None
    try:
        address = check_address(notice.webhook if isinstance(notice.webhook, str) else notice.webhook.read())
    except ValueError as error:
        raise UsageError(str(error)) from None
    key = None if notice.secret is None else notice.secret.read().encode()
    host, problem, pause = urlsplit(address).hostname, "", notice.pause_seconds
    for attempt in range(1, notice.attempts + 1):
        problem, is_final = _try(address, make_headers(event, body, key), body, notice.timeout_seconds)
        if not problem:
            return ""
        problem = f"webhook at {host}: {problem}, attempt {attempt} of {notice.attempts}"
        if is_final:
            break
        if attempt < notice.attempts:
            time.sleep(min(pause, LONGEST_PAUSE))
            pause *= 2.0
    return problem


def make_headers(event: Event, body: bytes, key: bytes | None) -> dict[str, str]:
    """Return the headers of one attempt. The signature is of the time and the body, so that an old message cannot be
    sent again later."""
    now = str(int(time.time()))
    headers = {"Content-Type": "application/json", "User-Agent": "sparsebp", "X-SparseBP-Event": event.event}
    headers |= {"X-SparseBP-Delivery": event.id, "X-SparseBP-Timestamp": now}
    if key is not None:
        signature = hmac.new(key, now.encode() + b"." + body, hashlib.sha256).hexdigest()
        headers["X-SparseBP-Signature"] = f"sha256={signature}"
    return headers


def _try(address: str, headers: dict[str, str], body: bytes, timeout_seconds: float) -> tuple[str, bool]:
    """Return the problem of one attempt, empty without one, and whether another attempt is in vain."""
    found: list[tuple[str, bool]] = []
    too_late = f"no answer within {timeout_seconds:g} s"

    def attempt() -> None:
        request = urllib.request.Request(address, data=body, headers=headers, method="POST")
        try:
            # Only the status is read: what a server says of it is no concern of ours.
            urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_seconds).close()
            found.append(("", True))
        except urllib.error.HTTPError as error:
            found.append((f"HTTP {error.code}", error.code < 500 and error.code not in AGAIN))
            error.close()
        except Exception as error:  # a server may answer anything
            reason = getattr(error, "reason", error)
            # The socket's own time may be over just before that of the thread.
            late = isinstance(reason, TimeoutError)
            found.append((too_late if late else getattr(reason, "strerror", None) or type(reason).__name__, False))

    # By a thread, because a timeout of sockets begins anew with every byte: a server could drip for hours.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return found[0] if found else (too_late, False)


def write_log(text: str) -> None:
    """Append a line to the log; what would make it too long begins a new one."""
    file = home() / "notify.log"
    with suppress(OSError):
        if file.exists() and file.stat().st_size > LARGEST_LOG:
            file.replace(file.with_suffix(".log.1"))
        with file.open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {' '.join(text.split())}\n")


if __name__ == "__main__":
    main()
