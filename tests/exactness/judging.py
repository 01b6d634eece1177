"""Processes that judge one case after the other: one that hangs is killed, with all it has started.

A case that hangs is then a result as any other: a fault with a seed, and the next case gets a new process. A process
hangs if it neither says anything nor computes, so that a loaded machine hangs nothing, or if one judgement computes
for minutes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

IDLE_SECONDS = 45.0
LOOP_SECONDS = 300.0  # of CPU time; a judgement takes one, or six through a recipe
LEAST_SECONDS = 0.2  # of CPU time: less is what threads that wait use
EXIT_SECONDS = 10.0  # for a process that is told to end
HUNG = "it hung"
Judge = Callable[..., Iterator[Any]]  # yields what it finds; of nothing to say yet, None


class Judging:
    """One process that judges."""

    def __init__(self, prepare: Callable[[], None], judge: Judge) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, prepare, judge))
        self._process.start()
        theirs.close()
        self.asked: tuple[Any, ...] | None = ()  # None: it is free; empty: it is being prepared
        self._heard = self._seen = (0.0, 0.0)  # times and CPU times of its last message, and of its last sign of life

    def ask(self, *question: Any) -> None:
        """Give it a case."""
        self.asked = question
        self.pipe.send(question)
        self.hear()

    def hear(self) -> None:
        """Note that it has said something."""
        self._heard = self._seen = (time.monotonic(), self._count_cpu_seconds())

    def hangs(self, idle_seconds: float) -> bool:
        """Return whether it hangs in its case."""
        if not self.asked or time.monotonic() - self._seen[0] < idle_seconds / 3:
            return False
        now = time.monotonic(), self._count_cpu_seconds()
        if abs(now[1] - self._seen[1]) > LEAST_SECONDS:
            self._seen = now
        return now[0] - self._seen[0] > idle_seconds or now[1] - self._heard[1] > LOOP_SECONDS

    def _count_cpu_seconds(self) -> float:
        found = 0.0
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self._process.pid)
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    found += sum(process.cpu_times()[:2])
        return found

    def end(self) -> None:
        """End it, and all that it has started."""
        self.pipe.close()
        if self.asked is None:
            self._process.join(EXIT_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()


class Pool:
    """Processes that judge at the same time.

    Args:
        number: How many.
        prepare: Called once in each process.
        judge: Called there for each case; its signs of life, ``None``, restart the clock.
        idle_seconds: How long a judge may be silent and idle.
    """

    def __init__(
        self, number: int, prepare: Callable[[], None], judge: Judge, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._made, self._idle_seconds = (prepare, judge), idle_seconds
        self._judgings = [Judging(*self._made) for _ in range(number)]

    @property
    def free(self) -> list[Judging]:
        """Those that wait for a case."""
        return [one for one in self._judgings if one.asked is None]

    @property
    def is_idle(self) -> bool:
        """Whether no case is under way."""
        return not any(one.asked for one in self._judgings)

    def listen(self, seconds: float = 1.0) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yield each question that was answered with what was found; with a text that says so if its judge is lost."""
        by_pipe: dict[Any, Judging] = {one.pipe: one for one in self._judgings}
        for pipe in wait(list(by_pipe), seconds):
            judging = by_pipe[pipe]
            try:
                is_over, found = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                yield from self._lose(judging, "its process died")
                continue
            asked = judging.asked
            judging.hear()
            if is_over:
                judging.asked = None
            elif found is not None and asked:
                yield asked, found
        for one in list(self._judgings):
            if one.hangs(self._idle_seconds):
                yield from self._lose(one, HUNG)

    def end(self) -> list[tuple[Any, ...]]:
        """End all; return the cases that were under way, of which nothing is known."""
        for one in self._judgings:
            one.end()
        left = [one.asked for one in self._judgings if one.asked]
        self._judgings = []
        return left

    def _lose(self, judging: Judging, text: str) -> Iterator[tuple[tuple[Any, ...], str]]:
        judging.end()
        self._judgings[self._judgings.index(judging)] = Judging(*self._made)
        if not judging.asked:
            raise RuntimeError(f"a process that judges could not be prepared: {text}")
        yield judging.asked, text


def _serve(pipe: Connection, prepare: Callable[[], None], judge: Judge) -> None:
    os.setpgid(0, 0)  # killed with what it starts
    prepare()
    pipe.send((True, None))
    while True:
        try:
            question = pipe.recv()
        except (EOFError, OSError):
            return
        for found in judge(*question):
            pipe.send((False, found))
        pipe.send((True, None))
