"""Read runs, and find repeated runs and runs that disturbed each other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.plan import Plan
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.tracking.content import find_state


def load(runs: Iterable[RunFolder | LoadedRun]) -> list[LoadedRun]:
    """Read runs in the given order, without duplicates. Keep runs that are already read. Mark repeats of a seed."""
    loaded: dict[str, LoadedRun] = {}
    for run in runs:
        if run.run_id not in loaded:
            loaded[run.run_id] = run if isinstance(run, LoadedRun) else load_folder(run)
    found = list(loaded.values())
    mark_repeats(found)
    return found


def load_folder(run: RunFolder) -> LoadedRun:
    """Read a run's plan and event log from its folder. Raise ``RunNotFoundError`` without a readable plan."""
    plan, history = Plan.load(run.plan_file), History.load(run.path)
    loaded = LoadedRun.of_plan(plan, history, find_state(run, history))
    loaded.sequential = run.trial_file.exists()
    return loaded


def mark_repeats(runs: Sequence[LoadedRun]) -> None:
    """Set ``repeats`` of every run whose seed an earlier run has; the first that finished or diverged counts. If the
    newest counted, a user could repeat a seed until its result is good."""
    first: dict[tuple[str, int], LoadedRun] = {}
    for run in runs:
        run.repeats = ""
    ended = [run for run in runs if run.finished or run.broke_down]
    # Sort by id too, so that the order of two runs with equal times is fixed.
    for run in sorted(ended, key=lambda run: (run.created, run.run_id)):
        kept = first.setdefault((run.group, run.seed), run)
        run.repeats = "" if kept is run else kept.run_id


def ran_together(runs: Sequence[LoadedRun]) -> Iterator[tuple[LoadedRun, LoadedRun]]:
    """Yield each pair of counting runs whose steps overlap in time: on one machine they slowed each other down."""
    timed = sorted((run for run in runs if run.step_times), key=lambda run: run.step_times[0])
    for index, first in enumerate(timed):
        for second in timed[index + 1 :]:
            if second.step_times[0] >= first.step_times[-1]:
                break
            # A run that worked only while the other was interrupted did not disturb it.
            low = bisect_left(first.step_times, second.step_times[0])
            high = bisect_right(first.step_times, second.step_times[-1])
            if high > low:
                yield first, second
