"""Deliver one event from standard input: ``python -m sparsebp_tools.notify.deliver``.

A failed delivery adds one line to ``notify.log`` in the home of runs. The line names only the program, because its
arguments may be secrets.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.run import History, RunFolder, State, home
from sparsebp_tools.notify.event import Event
from sparsebp_tools.notify.settings import Notice, load_settings

DIVERGED = 3  # a worker's exit code
LARGEST_LOG = 1 << 20
EVENTS = {State.FINISHED: "finished", State.FAILED: "failed", State.INTERRUPTED: "interrupted"}


def complete(event: Event) -> Event | None:
    """Return an event, with the facts of its run if a run ended; None if there is nothing to deliver."""
    if event.event:
        return event
    run = RunFolder(Path(event.facts["folder"]))
    history, plan = History.load(run.path), run.read_plan()
    state = run.ended()
    name = EVENTS.get(state) if state is not None else None
    # At `checkpoint.stop_at`, which a study with halving sets.
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
        "eval_loss": loss if loss is not None and math.isfinite(loss) else None,  # JSON has no other numbers
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
    """Deliver to one recipient, and return whether it succeeded; write a failure's reason to the log."""
    told = {"event": event.event, "id": event.id, "time": event.time, "facts": event.facts}
    try:
        body = json.dumps(told, allow_nan=False, default=str).encode()
    except ValueError:
        write_log(f"{event.event}: has a number that JSON does not know")
        return False
    if problem := _run(notice, body):
        write_log(f"{event.event} {event.facts.get('run_id', '')}: {problem}")
    return not problem


def _run(notice: Notice, body: bytes) -> str:
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


def write_log(text: str) -> None:
    """Append a line to the log; a full log starts again."""
    file = home() / "notify.log"
    with suppress(OSError):
        if file.exists() and file.stat().st_size > LARGEST_LOG:
            file.replace(file.with_suffix(".log.1"))
        with file.open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {' '.join(text.split())}\n")


if __name__ == "__main__":
    main()
