"""Launch a run's ranks on this machine with torchrun, and write the final status if the ranks cannot.

On several nodes one launcher runs on each. The first one holds the run's lock and writes the final status.

torchrun hides exit codes. So the first rank writes the final status into the event log, and a failing rank writes its
reason to the file that torchrun names for it, outside the run's folder.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from sparsebp_cli.errors import RunFailedError, SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import JournalWriter, RunFolder, State, interpreter
from sparsebp_cli.run.journal import read
from sparsebp_cli.run.record_type import EndRecord
from sparsebp_cli.worker.ending import DIVERGED, StopRequest, stop_message
from sparsebp_cli.worker.node import GRACE_SECONDS, LOST_CODE, NodeGroup
from sparsebp_cli.worker.process import MEETING_FILE, process_options, read_place
from sparsebp_cli.worker.rank import Reason

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# The caller decides how long to wait for a stopped run's checkpoint; torchrun would kill the ranks after 30 s.
STOP_SECONDS = 24 * 3600
GUARD_SECONDS = 1.0  # between two checks of the ranks


def run_ranks(plan: Plan, run: RunFolder, stop: StopRequest) -> int:
    """Execute a plan in several processes and return the exit code. The caller holds the lock of the run's folder."""
    with run.lock("rank"):  # wait until the ranks of a killed worker have ended
        pass
    options = process_options(plan.recipe)
    with JournalWriter(run.path) as journal:
        attempt = journal.attempt
    try:
        place = read_place(options)
        nodes = None if place is None else NodeGroup(place, options, run.path)
    except SparseBPError as error:
        return _write_end(run, attempt, None, Reason(0, str(error), error.exit_code, 0.0, is_echo=False))
    if nodes is None:
        asked, reason = (stop.signal, None) if stop.signal else _run(plan, run)
        return _write_end(run, attempt, asked, reason)
    with nodes:
        nodes.check_folder()
        asked, reason = (stop.signal, None) if stop.signal else _run(plan, run, nodes)
        code = _write_end(run, attempt, asked, nodes.find_cause(reason))
        nodes.finish(code)
        return code


def run_ranks_of_node(plan: Plan, run: RunFolder) -> int:
    """Execute the part of a plan that belongs to a node other than the first. Return the run's exit code."""
    options = process_options(plan.recipe)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # our one line reports a lost first node
    try:
        place = read_place(options)
        assert place is not None
        with NodeGroup(place, options, run.path) as nodes:
            try:
                nodes.check_folder()
                reason = _run(plan, run, nodes)[1]
            except SparseBPError as error:
                reason = Reason(0, str(error), error.exit_code, time.time(), is_echo=False)
            return nodes.report(reason)
    except RunFailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return LOST_CODE
    except SparseBPError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _write_end(run: RunFolder, attempt: int, asked: signal.Signals | None, reason: Reason | None) -> int:
    """Write the run's final status unless the first rank did. Return the exit code."""
    end, step = _read_end(run, attempt)
    if end is not None and end["status"] == State.FINISHED:
        return 0
    if end is not None and end["status"] == State.INTERRUPTED:
        if end.get("cause") == "paused":
            return 0
        return 128 + end.get("signal", int(signal.SIGTERM))
    with JournalWriter(run.path) as journal:
        journal.attempt = attempt
        if reason is None and asked is not None:
            text = stop_message(asked, step)
            journal.write("end", status=State.INTERRUPTED, step=step, text=text, signal=int(asked))
            return 128 + asked
        reason = reason or Reason(0, "all processes of the run ended without an error message", 1, 0.0, is_echo=False)
        print(f"error: {reason.text}", file=sys.stderr)
        cause = {"cause": "diverged"} if reason.code == DIVERGED else {}
        journal.write("end", status=State.FAILED, step=step, text=reason.text, **cause)
        return reason.code


class RankGuard(threading.Thread):
    """Kills the ranks of this machine that should have ended: one of them has, or the run is over elsewhere."""

    killed: set[int]  # process ids

    def __init__(self, grace_seconds: float, is_over: Callable[[], bool]) -> None:
        """Watch the children that this process starts from now on. They get ``grace_seconds`` to end by themselves."""
        super().__init__(daemon=True)
        self._others = {child.pid for child in psutil.Process().children()}  # children that are not ranks
        self._grace_seconds, self._is_over = grace_seconds, is_over
        self._done = threading.Event()
        self.killed = set()

    def run(self) -> None:
        """Check the ranks until :meth:`stop` is called."""
        parent, most, since = psutil.Process(), 0, None
        while not self._done.wait(GUARD_SECONDS):
            ranks = [child for child in parent.children() if child.pid not in self._others]
            # Ranks start one after another: fewer than the largest number so far means that one has ended.
            most = max(most, len(ranks))
            if len(ranks) == most and not self._is_over():
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > self._grace_seconds:
                for rank in ranks:
                    self.killed.add(rank.pid)
                    with suppress(psutil.NoSuchProcess):
                        rank.kill()

    def stop(self) -> None:
        """Stop watching."""
        self._done.set()
        self.join()


def _run(plan: Plan, run: RunFolder, nodes: NodeGroup | None = None) -> tuple[signal.Signals | None, Reason | None]:
    """Start the ranks of this machine and wait for them. Return the signal that stopped them, and why they failed; each
    None if there is none."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def interrupt(number: int, _: FrameType | None) -> None:
        raise SignalException("asked to stop", signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGINT):  # torchrun installs its handlers only after starting the ranks
        signal.signal(number, interrupt)
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # each sets its own level; run_ranks reports failures itself
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # Otherwise a second launch in one store reads the first launch's values: pytorch #135712.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = process_options(plan.recipe)
    here = options.processes // options.nodes
    # PyTorch 2.11 lacks this argument and gives ranks 30 seconds.
    patience: Any = {"shutdown_timeout": STOP_SECONDS} if "shutdown_timeout" in LaunchConfig.__annotations__ else {}
    guard = RankGuard(nodes.grace_seconds, nodes.is_over) if nodes else RankGuard(GRACE_SECONDS, lambda: False)
    with TemporaryDirectory(prefix="sparsebp-") as folder:
        os.environ[MEETING_FILE] = str(Path(folder) / "meeting")
        config = LaunchConfig(
            min_nodes=1,  # also for several nodes: see decision 14
            max_nodes=1,
            nproc_per_node=here,
            run_id=plan.run_id,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle="SIGTERM,SIGINT",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **patience,
        )
        asked: signal.Signals | None = None
        failures: Mapping[int, ProcessFailure] = {}
        guard.start()
        try:
            # -P: do not import a torch.py from the working folder. See interpreter.py.
            elastic_launch(config, interpreter.PYTHON)("-P", "-m", "sparsebp_cli.worker", str(run.plan_file))
        except SignalException as error:
            asked = error.sigval
        except ChildFailedError as error:
            first = nodes.place.node * here if nodes else 0
            # Ranks that the guard killed are not a cause of the failure.
            failures = {first + n: failure for n, failure in error.failures.items() if failure.pid not in guard.killed}
        guard.stop()
        return asked, _find_reason(Path(folder), failures, options.processes)


def _find_reason(folder: Path, failures: Mapping[int, ProcessFailure], count: int) -> Reason | None:
    """Return the first cause: a rank's own error, else the signal or exit code that ended one, else a lost peer."""
    told = []
    for file in folder.rglob("error.json"):
        try:
            told.append(Reason(**json.loads(file.read_bytes())["message"]["reason"]))
        except (ValueError, KeyError, TypeError):
            continue  # incomplete: the rank was killed while writing it
    told.sort(key=lambda reason: (reason.is_echo, reason.time))
    silent = {reason.rank for reason in told}
    died = [
        Reason(rank, f"rank {rank} of {count} {_describe_exit(failure.exitcode)}", 1, failure.timestamp, is_echo=False)
        for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp)
        if rank not in silent
    ]
    own = [reason for reason in told if not reason.is_echo]
    return next(iter([*own, *died, *told]), None)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} without an error message"
    known = -code in {int(number) for number in signal.Signals}  # real-time signals have no names
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _read_end(run: RunFolder, attempt: int) -> tuple[EndRecord | None, int]:
    """Return the final status that the first rank wrote (None if it wrote none), and the last step with metrics."""
    step = 0
    end: EndRecord | None = None
    for record, _ in read(run.path):
        if record["attempt"] == attempt:
            end = record if record["kind"] == "end" else end
            step = max(step, record["step"] if record["kind"] == "metrics" else 0)
    return end, step
