"""Compare two groups, never more, after equal work, equal time or equal steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from sparsebp_cli.compare.cost import count_examples, count_work
from sparsebp_cli.compare.figure import by_seed
from sparsebp_cli.compare.loaded import LoadedRun, Point
from sparsebp_cli.compare.measured import AtEqual, Unequal
from sparsebp_cli.compare.statistics import Spread, paired_difference, spread

LATEST = 1.05  # runs of equal work differ by a few percent; a lower limit would drop the slower one's last evaluation
EARLIEST = 0.9  # an earlier value belongs to less work: dense at step 20 says nothing about dense at step 38

Place = Callable[[Point], float]
Values = tuple[list[float], dict[int, float]]  # of all runs, and by seed


def compare_at_equal(
    runs: Sequence[LoadedRun], others: Sequence[LoadedRun], label: str, name: str, *, is_timed: bool
) -> AtEqual | None:
    """Compare the counting runs of two groups after as much work or time as the shorter of the two had. ``is_timed``
    allows seconds if the cost is unknown; they are meaningless on a busy machine. Each group has its last evaluation
    near that point, or none if it has no evaluation in the last tenth. Return None if neither cost nor time is known.
    """
    if not runs or not others:
        return None
    if (units := count_work(runs, others)) is not None:
        here, there, dense_step = units
        budget = min(max(run.steps for run in runs) * here, max(run.steps for run in others) * there)
        values = (
            _last(runs, name, budget, lambda p: p.step * here),
            _last(others, name, budget, lambda p: p.step * there),
        )
        return _entry(label, "cost", budget / dense_step, *values) if budget else None
    if not is_timed:
        return None
    budget = min(max(run.training_seconds for run in some) for some in (runs, others))
    both = (_last(some, name, budget, lambda p: p.seconds or 0.0) for some in (runs, others))
    return _entry(label, "time", budget, *both) if budget else None


def find_unequal(runs: Sequence[LoadedRun], others: Sequence[LoadedRun], name: str) -> Unequal | None:
    """Return how a group's training differs from the baseline's in steps or examples a step; None if it does not.
    Include the metric ``name``, which is evaluated during training, at the last step that both evaluated."""
    if not runs or not others:
        return None
    steps = [max(run.steps_to_end for run in some) for some in (runs, others)]
    examples, tokens = ([of(some[-1]) for some in (runs, others)] for of in (count_examples, _tokens))
    words = f"{steps[0]:,} steps against {steps[1]:,}" if steps[0] != steps[1] else ""
    steps_alone = words
    if examples[0] != examples[1]:
        words += f"{' and ' * bool(words)}{examples[0]:,} examples a step against {examples[1]:,}"
    elif None not in tokens and tokens[0] != tokens[1]:
        words += f"{' and ' * bool(words)}{tokens[0]:,.0f} tokens a step against {tokens[1]:,.0f}"
    if not words:
        return None
    same_batch = steps_alone == words
    # Before the first step both are the same model.
    common = set.intersection(*(set(run.series(name)) for run in (*runs, *others))) - {0}
    if not common:
        return Unequal(words, same_batch)
    last = max(common)
    here, there = (by_seed(some, lambda run: run.series(name)[last]) for some in (runs, others))
    return Unequal(words, same_batch, last, name, paired_difference(here, there))


def _last(runs: Sequence[LoadedRun], name: str, budget: float, place: Place) -> Values:
    """Return each run's last value near the end of a budget, without interpolation."""
    found: dict[str, float] = {}
    for run in runs:
        if near := [p.value for p in run.curve(name) if EARLIEST * budget <= place(p) <= LATEST * budget]:
            found[run.run_id] = near[-1]
    return list(found.values()), by_seed(runs, lambda run: found.get(run.run_id))


def _entry(label: str, by: Literal["cost", "time"], amount: float, mine: Values, its: Values) -> AtEqual:
    (values, here), (others, there) = mine, its
    if shared := here.keys() & there.keys():
        values, others = [here[seed] for seed in shared], [there[seed] for seed in shared]
    if not values or not others:
        return AtEqual(label, by, amount, None, None, None)
    spreads: tuple[Spread | None, Spread | None] = (spread(values), spread(others))
    return AtEqual(label, by, amount, *spreads, paired_difference(here, there))


def _tokens(run: LoadedRun) -> float | None:
    tokens = run.history.facts.get("tokens_per_step")
    return float(tokens) if isinstance(tokens, int | float) else None
