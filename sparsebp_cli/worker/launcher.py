"""Starts the ranks of a run on this machine, through torchrun, and says how the run ended where they cannot.

torchrun hides exit codes, so the first rank writes how a run ended into the journal, and a rank that fails leaves its
reason where torchrun tells it to, outside of the run's folder.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from sparsebp_cli.plan import Plan
from sparsebp_cli.run import JournalWriter, RunFolder, State
from sparsebp_cli.run.journal import read
from sparsebp_cli.worker.process import process_options
from sparsebp_cli.worker.rank import Reason
from sparsebp_cli.worker.stop import StopRequest, find_signal, tell_stop

# Who asked a run to stop decides how long to wait for its checkpoint, not torchrun (30 seconds).
STOP_SECONDS = 24 * 3600


def run_ranks(plan: Plan, run: RunFolder, stop: StopRequest) -> int:
    """Carry a plan out in several processes.

    Args:
        plan: What.
        run: Its folder; the caller holds its lock.
        stop: What was asked so far.

    Returns:
        The worker's exit code.
    """
    with run.lock("rank"):  # ranks of a worker that was killed are gone a moment later
        pass
    with JournalWriter(run.path) as journal:
        attempt = journal.attempt
    asked, reason = (stop.signal, None) if stop.signal else _run(plan, run)
    end, step = _read_end(run, attempt)
    if end is not None and end["status"] == State.FINISHED:
        return 0
    if end is not None and end["status"] == State.INTERRUPTED:
        return 128 + (find_signal(end["text"]) or signal.SIGTERM)
    with JournalWriter(run.path) as journal:
        journal.attempt = attempt
        if reason is None and asked is not None:
            journal.write("end", status=State.INTERRUPTED, step=step, text=tell_stop(asked, step))
            return 128 + asked
        reason = reason or Reason(0, "the processes of the run ended without a word", 1, 0.0, is_echo=False)
        print(f"error: {reason.text}", file=sys.stderr)
        journal.write("end", status=State.FAILED, step=step, text=reason.text)
        return reason.code


def _run(plan: Plan, run: RunFolder) -> tuple[signal.Signals | None, Reason | None]:
    """Start the ranks and wait for them; return the signal that came, and why they failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def interrupt(number: int, _: FrameType | None) -> None:
        raise SignalException("asked to stop", signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGINT):  # torchrun does the same, but only once the ranks were started
        signal.signal(number, interrupt)
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own; what they tell is told below
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Else a second start in one store finds what the first left there: pytorch #135712.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    count = process_options(plan.recipe).processes
    # PyTorch 2.11 has no such word, and gives ranks half a minute.
    patience: Any = {"shutdown_timeout": STOP_SECONDS} if "shutdown_timeout" in LaunchConfig.__annotations__ else {}
    with TemporaryDirectory(prefix="sparsebp-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=plan.run_id,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle="SIGTERM,SIGINT",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **patience,
        )
        asked, failures = None, dict[int, Any]()
        try:
            elastic_launch(config, sys.executable)("-P", "-m", "sparsebp_cli.worker", str(run.plan_file))
        except SignalException as error:
            asked = error.sigval
        except ChildFailedError as error:
            failures = error.failures
        return asked, _find_reason(Path(folder), failures, count)


def _find_reason(folder: Path, failures: Mapping[int, Any], count: int) -> Reason | None:
    """Find what went wrong first: an error of a rank's own, else what killed one, else that one is gone."""
    told = []
    for file in folder.rglob("error.json"):
        try:
            told.append(Reason(**json.loads(file.read_bytes())["message"]["reason"]))
        except (ValueError, KeyError, TypeError):
            continue  # half written: the rank was killed over it
    told.sort(key=lambda reason: (reason.is_echo, reason.time))
    silent = {reason.rank for reason in told}
    died = [
        Reason(rank, f"rank {rank} of {count} {_tell_code(failure.exitcode)}", 1, failure.timestamp, is_echo=False)
        for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp)
        if rank not in silent
    ]
    own = [reason for reason in told if not reason.is_echo]
    return next(iter([*own, *died, *told]), None)


def _tell_code(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}, without a word"
    known = -code in {int(number) for number in signal.Signals}  # real-time signals have no names
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _read_end(run: RunFolder, attempt: int) -> tuple[dict[str, Any] | None, int]:
    """Return the end that the first rank wrote, if it did, and the last step that it measured."""
    end, step = None, 0
    for record, _ in read(run.path):
        if record["attempt"] == attempt:
            end = record if record["kind"] == "end" else end
            step = max(step, record["step"] if record["kind"] == "metrics" else 0)
    return end, step
