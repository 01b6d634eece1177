"""Reads runs from their folders, and says which of them count and which disturbed each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from sparsebp_cli.compare.grouping import Grouping
from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.sequential import Looks
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.tracking.content import find_state


def load(runs: Iterable[RunFolder | LoadedRun], grouping: Grouping) -> list[LoadedRun]:
    """Read runs, in the order given; a run given twice is read once.

    Args:
        runs: Any runs; those that are read already are taken as they are.
        grouping: What decides which of them form a group.

    Returns:
        Them, with those marked that repeat an earlier run of their seed.
    """
    loaded: dict[str, LoadedRun] = {}
    for run in runs:
        if run.run_id not in loaded:
            loaded[run.run_id] = run if isinstance(run, LoadedRun) else load_folder(run)
    placed = grouping.apply(list(loaded.values()))
    mark_repeats(placed)
    return placed


def load_folder(run: RunFolder) -> LoadedRun:
    """Read a run's plan and journal.

    Args:
        run: Its folder, on this machine or copied from another.

    Returns:
        The run.

    Raises:
        RunNotFoundError: There is no readable plan in it.
    """
    plan, history = Plan.load(run.plan_file), History.load(run.path)
    loaded = LoadedRun.of_plan(plan, history, find_state(run, history))
    loaded.looks = Looks.load(run.path)
    return loaded


def mark_repeats(runs: Sequence[LoadedRun]) -> None:
    """Say of every run whether an earlier one has its seed; the first that finished or diverged counts.

    Were it the newest, a seed could be repeated until its result is good.

    Args:
        runs: All that are compared, with their groups; their ``repeats`` is set.
    """
    first: dict[tuple[str, int], LoadedRun] = {}
    for run in runs:
        run.repeats = ""
    ended = [run for run in runs if run.seed is not None and (run.finished or run.broke_down)]
    for run in sorted(ended, key=lambda run: (run.created, run.run_id)):
        assert run.seed is not None
        kept = first.setdefault((run.group, run.seed), run)
        run.repeats = "" if kept is run else kept.run_id


def ran_together(runs: Sequence[LoadedRun]) -> list[tuple[LoadedRun, LoadedRun]]:
    """Return pairs of runs whose steps interleave in time: on one machine they slowed each other down.

    Args:
        runs: Runs that count.

    Returns:
        Each neighbouring pair in time once.
    """
    timed = sorted((run for run in runs if run.step_times), key=lambda run: run.step_times[0])
    pairs = []
    for index, first in enumerate(timed):
        for second in timed[index + 1 :]:
            if second.step_times[0] >= first.step_times[-1]:
                break
            # A run that did its work while the other was interrupted did not disturb it.
            low = bisect_left(first.step_times, second.step_times[0])
            high = bisect_right(first.step_times, second.step_times[-1])
            if high > low:
                pairs.append((first, second))
    return pairs
