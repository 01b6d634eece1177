"""``python -m sparsebp_cli.worker RUN/plan.json``: execute one plan, or resume it from its last checkpoint.

Exit codes: 0 finished, or stopped by checkpoint.stop_at; 1 failed; 2 the recipe cannot be executed here; 3 diverged; 4
lost a node; 130 interrupted; 143 terminated. The event log records the reason. Standard error shows it too, with the
traceback of unexpected errors.

For a plan with several processes, this process starts them with the same command and waits for them. On several nodes
one worker runs on each, and the environment says where (see :mod:`sparsebp_cli.worker.process`).
"""

from __future__ import annotations

import sys
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path

from sparsebp_cli.errors import ChangedError, DivergedError, RunBusyError, SparseBPError
from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe import refuse_unsupported
from sparsebp_cli.run import JournalWriter, RunFolder, State, interpreter, keep_private
from sparsebp_cli.worker import wait_briefly
from sparsebp_cli.worker.ending import StopRequest, describe_failure, name_refusal, pause_message, stop_message
from sparsebp_cli.worker.process import NodePlace, process_options
from sparsebp_cli.worker.rank import find_rank, run_rank

# The functions below import torch, whose OpenMP reads this once, when torch is loaded.
wait_briefly()


def main(plan_file: Path) -> int:
    """Execute the ``plan.json`` of a run folder and return the exit code of the process."""
    keep_private()
    stop = StopRequest.install()
    run = RunFolder(plan_file.absolute().parent)
    try:
        return _work(plan_file, run, stop)
    except OSError as error:
        return _report_unwritten(error, 1)


def _work(plan_file: Path, run: RunFolder, stop: StopRequest) -> int:
    with ExitStack() as stack:
        try:
            place = NodePlace.read()
            plan = _load_plan(plan_file, place)
            is_first = place is None or place.node == 0 or process_options(plan.recipe).nodes == 1
            rank = find_rank(plan)
            if rank is None:  # a rank has its launcher's environment, plus torchrun's variables
                options = plan.recipe.target.options
                interpreter.keep_declared(*(options.get(key) or {} for key in ("env", "secrets", "setup")))
            if rank is None and is_first:
                stack.enter_context(run.lock("worker"))
            elif rank == 0:
                # Ranks may outlive a launcher that was killed: the next launcher waits for this lock.
                stack.enter_context(run.lock("rank"))
        except (RunBusyError, SparseBPError) as error:
            _print_error(f"error: {error}")
            return error.exit_code
        if rank is not None:
            run_rank(plan, run, stop, rank)
        if run.ended() is State.FINISHED:
            return 0
        try:
            refuse_unsupported(plan.recipe)
        except SparseBPError as error:
            _print_error(f"error: {error}")
            if is_first:
                with JournalWriter(run.path) as journal:
                    journal.write("end", status=State.FAILED, step=0, text=str(error))
            return error.exit_code
        if not is_first:
            from sparsebp_cli.worker.launcher import run_ranks_of_node

            return run_ranks_of_node(plan, run)
        if process_options(plan.recipe).processes > 1:
            from sparsebp_cli.worker.launcher import run_ranks

            return run_ranks(plan, run, stop)
        return _execute(plan, run, stack.enter_context(JournalWriter(run.path)), stop)


def _load_plan(plan_file: Path, place: NodePlace | None) -> Plan:
    if place is not None and place.node and not plan_file.exists():
        from sparsebp_cli.worker.node import refuse_unshared

        raise refuse_unshared(place, plan_file.parent)
    return Plan.load(plan_file)


def _execute(plan: Plan, run: RunFolder, journal: JournalWriter, stop: StopRequest) -> int:
    from sparsebp_cli.worker.training import Training

    training: Training | None = None
    try:
        training = Training.build(plan, run, journal, stop)
        training.run_to_end()
    except Exception as error:
        text, code = describe_failure(error)
        if not isinstance(error, SparseBPError) and name_refusal(error) is None:
            with suppress(MemoryError):  # describing an out-of-memory error may itself need memory
                traceback.print_exc()
        _print_error(f"error: {text}")
        more: dict[str, object] = {"changes": error.changes} if isinstance(error, ChangedError) else {}
        more |= {"cause": "diverged"} if isinstance(error, DivergedError) else {}
        return _end(journal, code, State.FAILED, training.step if training else 0, text, **more)
    if stop.signal is not None and not training.is_done:
        text = stop_message(stop.signal, training.step)
        return _end(journal, 128 + stop.signal, State.INTERRUPTED, training.step, text, signal=int(stop.signal))
    if training.is_paused:
        return _end(journal, 0, State.INTERRUPTED, training.step, pause_message(training.step), cause="paused")
    limit = {"cause": "limit"} if training.end_reason else {}
    return _end(journal, 0, State.FINISHED, training.step, training.end_reason, **limit)


def _end(journal: JournalWriter, code: int, status: State, step: int, text: str, **more: object) -> int:
    """Write the run's final status and return the exit code. It is nonzero if the event log could not be written."""
    try:
        journal.write("end", status=status, step=step, text=text, **more)
    except OSError as error:
        return _report_unwritten(error, code or 1)
    return code


def _report_unwritten(error: OSError, code: int) -> int:
    reason, remedy = name_refusal(error) or (str(error), "fix this, then resume")
    _print_error(f"error: the run's folder cannot be written: {reason}: {remedy}")
    return code


def _print_error(text: str) -> None:
    with suppress(OSError):  # the output may be a file on the same full disk
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
