"""Run one of several processes that train together, from its launch by torchrun to its exit."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import JournalWriter, RunFolder, State, durable
from sparsebp_cli.run.journal import FILE
from sparsebp_cli.worker.ending import StopRequest, pause_message, stop_message
from sparsebp_cli.worker.process import Ranks, find_number, process_options

ORPHAN_SECONDS = 0.1
REASON_FILE = "TORCHELASTIC_ERROR_FILE"
# Parts of error texts of a rank that lost the connection to another rank.
PEER_ERRORS = ("by peer", "gloo", "nccl", "broken pipe", "diststore", "distnetwork")


@dataclass(frozen=True)
class Reason:
    """Why a rank failed."""

    rank: int
    text: str  # one line
    code: int  # the worker's exit code
    time: float  # seconds since 1970
    is_echo: bool  # whether the rank only noticed that another one is gone


def write_reason(rank: int, text: str, code: int) -> Reason:
    """Write why a rank failed, in one line with the worker's exit code, to the file that torchrun reads."""
    is_echo = any(word in text.lower() for word in PEER_ERRORS)
    reason = Reason(rank, text, code, time.time(), is_echo)
    details = {"extraInfo": {"timestamp": str(int(reason.time))}, "message": text, "reason": vars(reason)}
    if file := os.environ.get(REASON_FILE):
        durable.write_file(Path(file), json.dumps({"message": details}))
    return reason


class SilentJournal(JournalWriter):
    """An event log that writes nothing, for every rank but the first."""

    path: Path

    def __init__(self, run_folder: Path) -> None:
        """Keep the log's path for reading, without opening it."""
        self.path = run_folder / FILE

    def write(self, kind: str, **fields: object) -> None:
        """Write nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def find_rank(plan: Plan) -> int | None:
    """Return the rank with which torchrun started this process; None if torchrun did not start it for this plan."""
    is_ours = os.environ.get("TORCHELASTIC_RUN_ID") == plan.run_id
    return find_number(process_options(plan.recipe)) if is_ours else None


def end_with_parent() -> None:
    """Exit as soon as the parent process is gone, because nothing else would end an orphaned rank."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_rank(plan: Plan, run: RunFolder, stop: StopRequest, rank: int) -> NoReturn:
    """Train as one rank and exit the process. The first rank writes the final status if the run ended well; otherwise
    the launcher does."""
    from sparsebp_cli.worker.ending import describe_failure
    from sparsebp_cli.worker.training import Training

    end_with_parent()
    journal = JournalWriter(run.path) if rank == 0 else SilentJournal(run.path)
    training: Training | None = None
    code = 0  # also for a stopped run, because a nonzero exit code would make torchrun kill the other ranks
    try:
        ranks = Ranks.join(plan.recipe)
        training = Training.build(plan, run, journal, stop, ranks)
        training.run_to_end()
        ranks.barrier()
        if stop.signal is not None and not training.is_done:
            text, number = stop_message(stop.signal, training.step), int(stop.signal)
            journal.write("end", status=State.INTERRUPTED, step=training.step, text=text, signal=number)
        elif training.is_paused:
            text = pause_message(training.step)
            journal.write("end", status=State.INTERRUPTED, step=training.step, text=text, cause="paused")
        else:
            limit = {"cause": "limit"} if training.end_reason else {}
            journal.write("end", status=State.FINISHED, step=training.step, text=training.end_reason, **limit)
        ranks.leave()
    except Exception as error:
        text, code = describe_failure(error)
        if "timed out" in text.lower() or "wait timeout" in text.lower():
            minutes = process_options(plan.recipe).peer_timeout_min
            text = f"another process did not answer for {minutes:g} minutes (target.peer_timeout_min): {text}"
        reason = write_reason(rank, text, code)
        if not (isinstance(error, SparseBPError) or reason.is_echo):
            traceback.print_exc()
    journal.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit instead of returning, because returning may deadlock: PyTorch 2.13 destroys a gloo group while it holds the
    # GIL, and waits for a thread that needs the GIL.
    os._exit(code)
