"""Carries out runs elsewhere, in a process that outlives the client.

    python -m sparsebp_cli.target.dispatcher [--max-parallel N] [--adopt] RUN_FOLDER...

It is expendable: what it knows is in the runs' folders and at the place where the workers are. Killed with -9, it
leaves the workers at work; the next one finds them again, by handle or by label, and fetches what they did meanwhile.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sparsebp_cli.errors import RunFailedError, SparseBPError, UnreachableError, UsageError
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import RunFolder, State, keep_private
from sparsebp_cli.target.engine import Engine
from sparsebp_cli.target.errand import Errand, describe
from sparsebp_cli.target.start import answer, folders, leave_client

SLICE_SECONDS = 0.1
GROWTH = 1.15  # of the time between two looks
LONGEST_PAUSE = 60.0  # between two tries to reach a place that does not answer
MOST_DOUBLINGS = 30  # of that pause: a line may be cut for days, and 2.0**1024 is no number


class Dispatcher:
    """Several runs that go to one place."""

    def __init__(
        self,
        runs: Sequence[RunFolder],
        engine: Engine,
        *,
        max_parallel: int = 1,
        adopt_only: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take the runs.

        Args:
            runs: With a plan in each.
            engine: The place.
            max_parallel: How many may work at once.
            adopt_only: Whether only workers that are there already are followed; nothing is started.
            sleep: Waits so many seconds.

        Raises:
            RunBusyError: Another dispatcher has one of them.
        """
        self._engine, self._max_parallel, self._adopt_only, self._sleep = engine, max_parallel, adopt_only, sleep
        self._waiting: list[Errand] = []
        self._live: list[Errand] = []
        self._pause = engine.fastest_seconds
        self._start_again = 0.0
        for run in runs:
            self._waiting.append(Errand(run, engine, os.getpid()))

    def begin(self) -> None:
        """Start the first run, or all that may work at once; take over those that are there already.

        Raises:
            SparseBPError: The first could not be started. Nothing is held any more.
        """
        for errand in self._waiting:
            errand.wait()
        try:
            for errand in [*self._waiting]:
                if errand.adopt():
                    self._take_over(errand)
        except UnreachableError as error:
            if not self._adopt_only:
                self._give_up(forget=True)
                raise
            for errand in self._waiting:
                errand.miss(str(error))
            return
        if self._adopt_only:
            self._give_up()
            return
        try:
            self._start_next()
        except UnreachableError as error:
            # It may have been started all the same: from now on it is looked for.
            self._waiting[0].miss(str(error))
        except SparseBPError as error:
            self._waiting.pop(0).drop(describe(error))
            self._give_up()
            raise

    def run_to_end(self) -> None:
        """Follow every run, start those that wait, until none is left."""
        while self._live or self._waiting:
            self._rest()
            self.turn()

    def turn(self) -> None:
        """Look at every run once."""
        for errand in [*self._live]:
            stopped = errand.asked
            errand.turn()
            if stopped and self._is_stop(errand):
                self._give_up()
                for other in self._live:
                    other.run.request_file.write_text("stop", encoding="utf-8")
            if errand.over:
                self._live.remove(errand)
        for errand in [*self._waiting]:
            if errand.run.cancel_file.exists():
                self._waiting.remove(errand)
                errand.drop()
        has_room = self._adopt_only or self._engine.has_queue or len(self._live) < self._max_parallel
        if self._waiting and has_room and time.monotonic() >= self._start_again:
            self._try_start()

    def _try_start(self) -> None:
        first = self._waiting[0]
        try:
            if first.adopt():
                self._follow(first)
            elif self._adopt_only:
                self._waiting.remove(first)
                first.drop()
            else:
                self._start_next()
        except UnreachableError as error:
            self._start_again = time.monotonic() + _pause_after(first.failures + 1)
            first.miss(str(error))
        except SparseBPError as error:
            self._waiting.remove(first)
            first.drop(describe(error))

    def _start_next(self) -> None:
        while self._waiting and (self._engine.has_queue or len(self._live) < self._max_parallel):
            chosen = self._waiting if self._engine.has_queue else self._waiting[:1]
            handles = self._engine.start([errand.run for errand in chosen], self._max_parallel)
            for errand, handle in zip([*chosen], handles, strict=True):
                errand.take(handle)
                self._follow(errand)
                errand.turn()

    def _take_over(self, errand: Errand) -> None:
        """Follow a worker that is there; conclude one that ended while no dispatcher looked, and let its run go on."""
        if self._adopt_only or not errand.conclude_ended():
            self._follow(errand)
            return
        place = self._waiting.index(errand)
        del self._waiting[place]
        if errand.run.state() in {State.INTERRUPTED, State.FAILED}:
            again = Errand(errand.run, self._engine, os.getpid())
            again.wait()
            self._waiting.insert(place, again)

    def _follow(self, errand: Errand) -> None:
        self._waiting.remove(errand)
        self._live.append(errand)

    def _give_up(self, *, forget: bool = False) -> None:
        """Start no other run."""
        while self._waiting:
            self._waiting.pop().drop(forget=forget)

    def _is_stop(self, errand: Errand) -> bool:
        return errand.run.request_file.exists() and not errand.run.cancel_file.exists()

    def _rest(self) -> None:
        engine = self._engine
        worst = max((errand.failures for errand in [*self._live, *self._waiting]), default=0)
        pause = _pause_after(worst) if worst else self._pause
        self._pause = min(self._pause * GROWTH, engine.slowest_seconds)
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and not (worst == 0 and any(errand.asked for errand in self._live)):
            self._sleep(min(SLICE_SECONDS, pause))


def _pause_after(failures: int) -> float:
    return min(2.0 ** min(failures, MOST_DOUBLINGS), LONGEST_PAUSE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Leave the client's process tree, then dispatch.

    Args:
        arguments: Of the command line; None: this process's own.
    """
    from sparsebp_cli.target import make_target
    from sparsebp_cli.target.remote import RemoteTarget

    parser = argparse.ArgumentParser(prog="python -m sparsebp_cli.target.dispatcher")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--max-parallel", type=int, default=1)
    parser.add_argument("--adopt", action="store_true")
    parsed = parser.parse_args(arguments)
    keep_private()
    if os.fork():
        os._exit(0)  # the client waits for this process only: no zombie is left to it
    try:
        runs = folders(parsed.runs)
        target = make_target(Plan.load(runs[0].plan_file).recipe.target)
        if not isinstance(target, RemoteTarget):
            raise UsageError(f"{type(target).__name__} is not a target that dispatches")
        dispatcher = Dispatcher(runs, target.engine, max_parallel=parsed.max_parallel, adopt_only=parsed.adopt)
        dispatcher.begin()
    except SparseBPError as error:
        answer(error)
        raise SystemExit(1) from None
    except OSError as error:
        answer(RunFailedError(f"the run could not be started: {error}"))
        raise SystemExit(1) from None
    answer()
    leave_client(runs[0])
    dispatcher.run_to_end()


if __name__ == "__main__":
    main()
