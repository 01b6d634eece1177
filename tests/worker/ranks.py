"""Whole runs as one process carries them out, and as two that train together."""

from __future__ import annotations

import os
import traceback
import warnings
from pathlib import Path
from uuid import uuid4

import torch

from sparsebp_cli.plan import Plan
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.worker.ending import StopRequest
from sparsebp_cli.worker.process import Ranks
from sparsebp_cli.worker.rank import SilentJournal
from tests.worker.conftest import FORKS


def make_run(recipe: Recipe, folder: Path) -> RunFolder:
    plan = Plan(recipe=recipe)
    run = RunFolder(folder / plan.run_id)
    run.path.mkdir(parents=True)
    plan.save(run.path)
    return run


def _train(runs: list[RunFolder], rank: int = 0, meeting: Path | None = None, *, is_summed: bool = True) -> None:
    """Carry plans out one after the other in this process: alone, or as one of two ranks."""
    from accelerate.state import AcceleratorState

    from sparsebp_cli.worker import build
    from sparsebp_cli.worker.training import Training

    if not is_summed:
        build.Accelerator.prepare_model = lambda _, model, **__: model
    torch.set_num_threads(1)
    if meeting is not None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for run in runs:
        AcceleratorState._reset_state(reset_partial_state=True)
        plan = Plan.load(run.plan_file)
        ranks = Ranks() if meeting is None else Ranks(rank, 2, plan.recipe.target.options["sharding"] == "fsdp2")
        with JournalWriter(run.path) if rank == 0 else SilentJournal(run.path) as journal:
            Training.build(plan, run, journal, StopRequest(), ranks).run_to_end()


def _train_as_rank(runs: list[RunFolder], rank: int, meeting: Path, is_summed: bool) -> None:
    """The body of a forked process."""
    with (runs[0].path.parent / f"rank-{rank}.log").open("w") as log:
        try:
            _train(runs, rank, meeting, is_summed=is_summed)
        except BaseException:
            traceback.print_exc(file=log)
            log.flush()
            os._exit(1)
        os._exit(0)


def train_alone(runs: list[RunFolder]) -> None:
    """Carry plans out one after the other in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # upstream's, which a worker does not stop at
        _train(runs)


def train_on_two(runs: list[RunFolder], *, is_summed: bool = True) -> None:
    """Carry plans out one after the other on two ranks, which are started once for all of them; with gradients that
    nobody sums if told so."""
    meeting = runs[0].path.parent / f"meeting-{uuid4().hex}"
    processes = [FORKS.Process(target=_train_as_rank, args=(runs, rank, meeting, is_summed)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    logs = "\n".join(file.read_text() for file in sorted(runs[0].path.parent.glob("rank-*.log")))
    assert [process.exitcode for process in processes] == [0, 0], logs
