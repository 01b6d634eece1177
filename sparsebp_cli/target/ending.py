"""How a run ended, said for a worker that could not say it itself."""

from __future__ import annotations

import signal
from typing import Any

from sparsebp_cli.errors import RunBusyError
from sparsebp_cli.run import JournalWriter, RunFolder, State, read

MAX_LINE_CHARACTERS = 300
STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
LOST = 255  # what docker notes for a container whose machine lost power


def settle(
    run: RunFolder,
    exit_code: int | None,
    *,
    after_attempt: int,
    log_offset: int = 0,
    text: str = "",
    failed: bool = False,
) -> State | None:
    """Append an ``end`` record where the worker left none, or where it was interrupted because of a cancel.

    Args:
        run: The run; its worker is dead. The caller holds the target's lock.
        exit_code: What the worker ended with; negative: killed by that signal; None: not known.
        after_attempt: Attempts in the journal before this worker was started.
        log_offset: Where the output of this worker begins in ``worker.log``.
        text: Why it ended, when the caller knows better than the exit code does.
        failed: Whether that text is about a failure; else about an interruption.

    Returns:
        The status appended; None when the worker had said it all.

    Raises:
        RunBusyError: The worker lives after all.
    """
    # The worker's lock is looked at, not taken: whoever asked for the state in between would be told "running".
    if run.is_locked("worker"):
        raise RunBusyError(f"the worker of run {run.run_id} lives: it says itself how it ends")
    with JournalWriter(run.path) as journal:
        journal.attempt = max(journal.attempt - 1, after_attempt + 1)
        step, end = _find_last(run, journal.attempt)
        cancelled = run.cancel_file.exists()
        if exit_code == 0 and run.ended() is State.FINISHED:
            return None  # it had nothing to do
        if end is not None and not (cancelled and end["status"] == State.INTERRUPTED):
            return None
        if cancelled:
            status, text = State.CANCELLED, "cancelled by the user"
        elif text and failed:
            status = State.FAILED
        elif text or _is_interruption(exit_code):
            status, text = State.INTERRUPTED, text or _describe_interruption(exit_code)
        else:
            status, text = State.FAILED, _find_last_line(run, log_offset) or _describe_failure(exit_code)
        journal.write("end", status=str(status), step=step, text=text)
    return status


def _find_last(run: RunFolder, attempt: int) -> tuple[int, dict[str, Any] | None]:
    step, end = 0, None
    for record, _ in read(run.path):
        if record["kind"] == "metrics":
            step = max(step, record["step"])
        elif record["kind"] == "end" and record["attempt"] == attempt:
            end = record
    return step, end


def _is_interruption(exit_code: int | None) -> bool:
    """Whether something else ended the worker: a signal, or a place that went down. A worker itself ends below 128."""
    return exit_code is None or exit_code < 0 or exit_code == LOST or bool(_find_signal(exit_code))


def _find_signal(exit_code: int | None) -> str:
    """Return the name of the signal that an exit code stands for, negative or as a shell gives it; empty for none."""
    if exit_code is None:
        return ""
    try:
        return signal.Signals(-exit_code if exit_code < 0 else exit_code - 128).name
    except ValueError:
        return f"signal {-exit_code}" if exit_code < 0 else ""


def _describe_interruption(exit_code: int | None) -> str:
    if exit_code is None:
        return "the worker ended without a word"
    name = _find_signal(exit_code)
    if exit_code in STOPPED:
        return f"the worker was stopped by {name} before it could write a checkpoint"
    if not name:
        return f"the worker was lost: its place ended it with status {exit_code}, as when the machine goes down"
    hint = ": by somebody, or by the system for want of memory" if name == "SIGKILL" else ""
    return f"the worker was killed by {name}{hint}"


def _describe_failure(exit_code: int | None) -> str:
    reason = {126: ": its command cannot be executed", 127: ": its command was not found"}.get(exit_code or 0, "")
    return f"worker ended with status {exit_code}{reason}"


def _find_last_line(run: RunFolder, offset: int) -> str:
    try:
        with run.log_file.open("rb") as log:
            log.seek(offset)
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:MAX_LINE_CHARACTERS] for line in reversed(lines) if line.strip()), "")
