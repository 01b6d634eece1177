"""Write the ``end`` record of a run whose worker died before writing one."""

from __future__ import annotations

import signal

from sparsebp_cli.errors import RunBusyError
from sparsebp_cli.run import JournalWriter, RunFolder, State, read
from sparsebp_cli.run.budget import open_regular
from sparsebp_cli.run.record_type import EndRecord

MAX_LINE_CHARACTERS = 300
STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
LOST = 255  # docker's exit code for a container whose machine lost power


def write_end_record(
    run: RunFolder,
    exit_code: int | None,
    *,
    after_attempt: int,
    log_offset: int = 0,
    text: str = "",
    failed: bool = False,
) -> State | None:
    """Append an ``end`` record if the worker wrote none, or if a cancellation interrupted it.

    The worker must be dead, and the caller must hold the target's lock. ``after_attempt`` is the number of attempts in
    the event log before this worker started. Its output in ``worker.log`` begins at ``log_offset``. A negative exit
    code is a signal; None is unknown. ``text`` is the reason if the caller knows more than the exit code says; with
    ``failed`` it describes a failure, else an interruption.

    Return the appended status; None if the worker's own record is complete. Raise ``RunBusyError`` if the worker is
    alive.
    """
    # Test the worker's lock without taking it: while we held it, readers would see the run as "running".
    if run.is_locked("worker"):
        raise RunBusyError(f"run {run.run_id}: its worker is still alive and records the end itself: wait")
    with JournalWriter(run.path) as journal:
        # The writer counts a new attempt. This end belongs to the worker's attempt, even if the worker never recorded
        # its start.
        journal.attempt = max(journal.attempt - 1, after_attempt + 1)
        step, end = _find_last(run, journal.attempt)
        cancelled = run.cancel_file.exists()
        if exit_code == 0 and run.ended() is State.FINISHED:
            return None  # a worker that finds its run finished writes nothing
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


def _find_last(run: RunFolder, attempt: int) -> tuple[int, EndRecord | None]:
    step = 0
    end: EndRecord | None = None
    for record, _ in read(run.path):
        if record["kind"] == "metrics":
            step = max(step, record["step"])
        elif record["kind"] == "end" and record["attempt"] == attempt:
            end = record
    return step, end


def _is_interruption(exit_code: int | None) -> bool:
    """Return whether a signal or the loss of its machine ended the worker. A worker's own exit codes are below 128."""
    return exit_code is None or exit_code < 0 or exit_code == LOST or bool(_find_signal(exit_code))


def _find_signal(exit_code: int | None) -> str:
    """Return the name of the signal in an exit code (negative, or 128 + N as in a shell); empty if there is none."""
    if exit_code is None:
        return ""
    try:
        return signal.Signals(-exit_code if exit_code < 0 else exit_code - 128).name
    except ValueError:
        return f"signal {-exit_code}" if exit_code < 0 else ""


def _describe_interruption(exit_code: int | None) -> str:
    if exit_code is None:
        return "the worker ended without a message"
    name = _find_signal(exit_code)
    if exit_code in STOPPED:
        return f"the worker was stopped by {name} before it could write a checkpoint"
    if not name:
        return f"the worker was lost: its target ended it with exit code {exit_code}, as after a machine failure"
    hint = ": by a user, or by the system because memory ran out" if name == "SIGKILL" else ""
    return f"the worker was killed by {name}{hint}"


def _describe_failure(exit_code: int | None) -> str:
    reason = {126: ": its command cannot be executed", 127: ": its command was not found"}.get(exit_code or 0, "")
    return f"worker ended with status {exit_code}{reason}"


def _find_last_line(run: RunFolder, offset: int) -> str:
    try:
        with open_regular(run.log_file) as log:
            log.seek(offset)
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:MAX_LINE_CHARACTERS] for line in reversed(lines) if line.strip()), "")
