"""Two processes under DistributedDataParallel: the mean of both ranks' gradients, beside one process that knows both.

Each rank has batches of its own. The ranks are started once, and judge one case after the other.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import warnings
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from datetime import timedelta
from functools import cache
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsebp_cli.errors import SparseBPError
from tests.exactness.axis import Case
from tests.exactness.judge import NUM_UPDATES, WRONG, Loop, Outcome, Subject, policy_of
from tests.exactness.step import AloneWhereRestarting, Step
from tests.exactness.subject import make_model

NUM_RANKS = 2
OTHER = 500_000  # between the seeds of ranks
LOST = "the other rank ended"
WAIT_SECONDS = 15  # of a rank for the other


def judge_ranks(subject: Subject) -> list[Outcome]:
    """Judge a loop in two processes."""
    pools, port = _start()
    waiting = [pool.submit(_run, subject.case, subject.seed, rank, port) for rank, pool in enumerate(pools)]
    found = [one.result() for one in waiting]
    if any(o.verdict in ("wrong", "refused") or o.text.startswith(LOST) for outcomes in found for o in outcomes):
        _end()  # the ranks may be in different places of their step
    # What is wrong on one rank is wrong; a rank that refuses leaves the other alone, which loses its connection.
    for verdict in ("wrong", "refused"):
        for outcomes in found:
            if any(outcome.verdict == verdict for outcome in outcomes):
                return outcomes
    if any(outcomes[0].text.startswith(LOST) for outcomes in found):
        return [Outcome("wrong", f"a rank lost the other, which refused nothing: {found}"[:300])] * NUM_UPDATES
    return found[0]


@cache
def _start() -> tuple[list[ProcessPoolExecutor], int]:
    """Return the processes of the ranks, and the port at which they meet: one group for all of their cases, since the
    end of a group may wait for ever in PyTorch."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.exactness.rank"])
    pools = [ProcessPoolExecutor(1, mp_context=context) for _ in range(NUM_RANKS)]
    for pool in pools:
        # A child of multiprocessing joins its own children at its end, before executors end theirs: it would not end.
        Finalize(pool, _kill, (pool,), exitpriority=1)
    return pools, port


def _end() -> None:
    for pool in _start()[0]:
        _kill(pool)
    _start.cache_clear()


def _kill(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool: an executor only asks them to end."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)


def _run(case: Case, seed: int, rank: int, port: int) -> list[Outcome]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    subjects = [Subject(case, seed + OTHER * number) for number in range(NUM_RANKS)]
    plain = make_model(case)
    model = deepcopy(plain)
    # The second oracle is of families whose plain step lets texts of a row read each other.
    oracles = [Loop(plain, case, []), Loop(plain, case, [], AloneWhereRestarting(plain))]
    try:
        expected = [[_mean(oracle, subjects, rank, number) for oracle in oracles] for number in range(NUM_UPDATES)]
    except Exception as error:  # whatever a model or a loss thinks of such a batch: on both ranks, then
        return [Outcome("unjudged", f"{type(error).__name__}: {error}"[:120])] * NUM_UPDATES
    if not dist.is_initialized():
        # A rank that refuses amid its backward waits for the other, which waits for it.
        dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=WAIT_SECONDS))
    try:
        own = Loop(model, case, [policy_of(case)])
        own.wrap(DistributedDataParallel(model, find_unused_parameters=True))
        return [_judge(own, subjects[rank], number, expected[number]) for number in range(NUM_UPDATES)]
    except SparseBPError as error:
        return [Outcome("refused", str(error))] * NUM_UPDATES
    except RuntimeError as error:  # of torch.distributed, in many words; wrong if the other rank refused nothing
        return [Outcome("unjudged", f"{LOST}: {error}"[:120])] * NUM_UPDATES
    except Exception as error:
        return [Outcome("wrong", f"{type(error).__name__}: {error}"[:300])] * NUM_UPDATES


def _mean(oracle: Loop, subjects: list[Subject], rank: int, number: int) -> Step:
    """Return the mean of both ranks' gradients in an update, with the loss of one."""
    steps = [oracle.run(subject.updates[number], subject.seed + number) for subject in subjects]
    grads = tuple(sum(pair) / NUM_RANKS for pair in zip(*(step.grads for step in steps), strict=True))
    return Step(steps[rank].loss, grads)  # type: ignore[arg-type]


def _judge(own: Loop, subject: Subject, number: int, expected: list[Step]) -> Outcome:
    plain, alone = expected
    before: Any = own.counts.packed
    got = own.run(subject.updates[number], subject.seed + number)
    if not plain.is_finite or plain.is_empty:
        return Outcome("unjudged", "the plain gradient is empty or not finite")
    error, error_alone = plain.error(got), alone.error(got)
    if min(error, error_alone) > WRONG:
        text = f"error {error:.1e}, {error_alone:.1e} beside each text alone"
        return Outcome("wrong", f"{text}; {own.failure or own.counts.describe()}")
    if own.counts.packed > before:
        return Outcome("right", alone=error > WRONG)
    return Outcome("plain", own.failure or next(iter(own.counts.refused), "nothing to leave out"))
