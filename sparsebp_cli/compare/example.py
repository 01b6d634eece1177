"""Two trained models on the same held-out examples, example by example."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparsebp_cli.compare.loaded import LoadedRun
from sparsebp_cli.compare.measured import ExampleDifference
from sparsebp_cli.compare.statistics import summarise


def compare_examples(runs: Sequence[LoadedRun], baseline: Sequence[LoadedRun]) -> tuple[ExampleDifference, ...]:
    """Pair runs of one seed, and in each pair the examples.

    Args:
        runs: Of a group, that count.
        baseline: The baseline's.

    Returns:
        One entry a shared seed of which both runs kept the losses of the same examples after their last step.
    """
    here, there = ({run.seed: run for run in some if run.seed is not None} for some in (runs, baseline))
    found = []
    for seed in sorted(here.keys() & there.keys()):
        if pairs := _pair(here[seed], there[seed]):
            differences = [after - before for after, before in pairs]
            worse = sum(difference > 0.0 for difference in differences) / len(differences)
            found.append(ExampleDifference(seed, summarise(differences), worse))
    return tuple(found)


def have_other_examples(runs: Sequence[LoadedRun], others: Sequence[LoadedRun]) -> bool:
    """Whether runs are known to have been evaluated on other examples, by their number or their numbers of targets.

    The dataset's digest does not tell: it also covers what runs were trained on.

    Args:
        runs: That count.
        others: That count.

    Returns:
        False where nothing is known.
    """
    for what in (_count_examples, _list_targets):
        here, there = ({what(run) for run in some} - {None} for some in (runs, others))
        if here and there and here != there:
            return True
    return False


def _count_examples(run: LoadedRun) -> object:
    return run.history.facts.get("eval_examples")


def _list_targets(run: LoadedRun) -> tuple[float, ...] | None:
    targets = run.history.examples.get(run.steps, {}).get("targets")
    return tuple(sorted(targets)) if targets else None


def _pair(run: LoadedRun, other: LoadedRun) -> list[tuple[float, float]]:
    here, there = (some.history.examples.get(some.steps, {}) for some in (run, other))
    digests = {some.history.facts.get("dataset_digest") for some in (run, other)}
    if len(digests) > 1 or here.get("targets") != there.get("targets"):
        return []
    losses = zip(here.get("loss", []), there.get("loss", []), strict=False)
    return [(a, b) for a, b in losses if _is_number(a) and _is_number(b)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
