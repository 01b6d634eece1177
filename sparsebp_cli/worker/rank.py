"""One of several processes that train together: its whole life, from the command that torchrun gives it to its end."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sparsebp_cli.errors import SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import JournalWriter, RunFolder, State
from sparsebp_cli.run.journal import FILE
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.stop import StopRequest, tell_stop

ORPHAN_SECONDS = 0.1
REASON_FILE = "TORCHELASTIC_ERROR_FILE"
# What is said by one that notices that another is gone.
PEER_WORDS = ("by peer", "gloo", "nccl", "broken pipe", "diststore", "distnetwork")


@dataclass(frozen=True)
class Reason:
    """Why a rank failed.

    Args:
        rank: Which.
        text: One line.
        code: The worker's exit code.
        time: Seconds since 1970.
        is_echo: Whether it only noticed that another rank is gone.
    """

    rank: int
    text: str
    code: int
    time: float
    is_echo: bool


def leave_reason(rank: int, text: str, code: int) -> Reason:
    """Tell the process that started this rank why it fails.

    Args:
        rank: Which.
        text: One line.
        code: The worker's exit code.

    Returns:
        What was left.
    """
    is_echo = any(word in text.lower() for word in PEER_WORDS)
    reason = Reason(rank, text, code, time.time(), is_echo)
    details = {"extraInfo": {"timestamp": str(int(reason.time))}, "message": text, "reason": vars(reason)}
    if file := os.environ.get(REASON_FILE):
        Path(file).write_text(json.dumps({"message": details}), encoding="utf-8")
    return reason


class SilentJournal(JournalWriter):
    """What every rank but the first writes into: nothing."""

    def __init__(self, run_folder: Path) -> None:
        """Open nothing.

        Args:
            run_folder: The run's folder, for those who read its journal.
        """
        self.path = run_folder / FILE

    def write(self, kind: str, **fields: Any) -> None:
        """Write nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def own_rank(plan: Plan) -> int | None:
    """Return which rank of a plan this process was started as; None: it was not started as one of several."""
    is_ours = os.environ.get("TORCHELASTIC_RUN_ID") == plan.run_id
    return int(os.environ["RANK"]) if is_ours else None


def end_with_parent() -> None:
    """From now on, end at once when the process that started this one is gone: nobody else would ever end it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def work_as_rank(plan: Plan, run: RunFolder, stop: StopRequest, rank: int) -> NoReturn:
    """Train. How the run ended is written by the first rank if it ended well, else by the process that started it.

    Args:
        plan: What.
        run: Its folder; the first rank holds the lock ``rank``.
        stop: Asked at every step boundary.
        rank: Which one this is.
    """
    from sparsebp_cli.worker.failure import explain
    from sparsebp_cli.worker.training import Training

    end_with_parent()
    journal = JournalWriter(run.path) if rank == 0 else SilentJournal(run.path)
    training: Training | None = None
    code = 0  # also of a run that was stopped: else torchrun would end the other ranks
    try:
        ranks = Ranks.join(plan.recipe)
        training = Training.build(plan, run, journal, stop, ranks)
        training.run_to_end()
        ranks.wait()
        if stop.signal is not None and not training.is_done:
            text = tell_stop(stop.signal, training.step)
            journal.write("end", status=State.INTERRUPTED, step=training.step, text=text)
        else:
            journal.write("end", status=State.FINISHED, step=training.step, text="")
    except Exception as error:
        text, code = explain(error)
        reason = leave_reason(rank, text, code)
        if not (isinstance(error, SparseBPError) or reason.is_echo):
            traceback.print_exc()
    journal.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by returning: PyTorch 2.13 destroys a group of gloo with the interpreter's lock held and waits for a thread
    # that waits for that lock.
    os._exit(code)
