"""``python -m sparsebp_cli.worker RUN/plan.json``: execute one plan, or go on with it where it was left.

Exit codes: 0 finished; 1 failed; 2 the recipe cannot be carried out here; 3 diverged; 130 interrupted; 143 terminated.
The reason goes into the journal and, with the traceback of anything unexpected, to standard error.

Where a plan has several processes, this one starts them, each with the same command, and waits.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from sparsebp_cli.errors import ChangedError, RunBusyError, SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe import refuse_unbuilt
from sparsebp_cli.run import JournalWriter, RunFolder, State, keep_private
from sparsebp_cli.worker.process import process_options
from sparsebp_cli.worker.rank import own_rank, work_as_rank
from sparsebp_cli.worker.stop import StopRequest, tell_stop

# Read when torch loads OpenMP. Threads that spin at barriers make a step three to six times slower as soon as anything
# else wants a core; threads that sleep make it about a tenth slower on a quiet machine (both measured with 2 threads on
# 2 cores, the quickstart's model, torch 2.13). A value that the user set is left alone.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(plan_file: Path) -> int:
    """Execute a plan in its folder.

    Args:
        plan_file: ``plan.json`` in the run's folder.

    Returns:
        The exit code of the process.
    """
    keep_private()
    stop = StopRequest.install()
    run = RunFolder(plan_file.absolute().parent)
    try:
        return _work(plan_file, run, stop)
    except OSError as error:
        return _tell_unwritten(error, 1)


def _work(plan_file: Path, run: RunFolder, stop: StopRequest) -> int:
    with ExitStack() as stack:
        try:
            plan = Plan.load(plan_file)
            rank = own_rank(plan)
            if rank is None:
                stack.enter_context(run.lock("worker"))
            elif rank == 0:
                stack.enter_context(run.lock("rank"))
        except (RunBusyError, SparseBPError) as error:
            _tell(f"error: {error}")
            return error.exit_code
        if rank is not None:
            work_as_rank(plan, run, stop, rank)
        if run.ended() is State.FINISHED:
            return 0
        try:
            refuse_unbuilt(plan.recipe)
        except SparseBPError as error:
            _tell(f"error: {error}")
            with JournalWriter(run.path) as journal:
                journal.write("end", status=State.FAILED, step=0, text=str(error))
            return error.exit_code
        if process_options(plan.recipe).processes > 1:
            from sparsebp_cli.worker.launcher import run_ranks

            return run_ranks(plan, run, stop)
        return _execute(plan, run, stack.enter_context(JournalWriter(run.path)), stop)


def _execute(plan: Plan, run: RunFolder, journal: JournalWriter, stop: StopRequest) -> int:
    from sparsebp_cli.worker.checkpoint import is_disk_full
    from sparsebp_cli.worker.failure import explain
    from sparsebp_cli.worker.training import Training

    training: Training | None = None
    try:
        training = Training.build(plan, run, journal, stop)
        training.run_to_end()
    except Exception as error:
        text, code = explain(error)
        if not isinstance(error, SparseBPError) and not is_disk_full(error):
            traceback.print_exc()
        _tell(f"error: {text}")
        refused = {"changes": error.changes} if isinstance(error, ChangedError) else {}
        return _end(journal, code, State.FAILED, training.step if training else 0, text, **refused)
    if stop.signal is not None and not training.is_done:
        text = tell_stop(stop.signal, training.step)
        return _end(journal, 128 + stop.signal, State.INTERRUPTED, training.step, text)
    return _end(journal, 0, State.FINISHED, training.step, "")


def _end(journal: JournalWriter, code: int, status: State, step: int, text: str, **more: Any) -> int:
    """Write how the run ended; return the exit code, which is never 0 where the journal does not say so."""
    try:
        journal.write("end", status=status, step=step, text=text, **more)
    except OSError as error:
        return _tell_unwritten(error, code or 1)
    return code


def _tell_unwritten(error: OSError, code: int) -> int:
    reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
    _tell(f"error: the run's folder takes no more: {reason}; make room, then resume")
    return code


def _tell(text: str) -> None:
    with suppress(OSError):  # the output may be a file on the same disk
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
