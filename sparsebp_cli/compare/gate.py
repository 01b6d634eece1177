"""``--fail-if``: a condition over a comparison's numbers that ends the command with exit code 1, for use in CI.

Names: ``METRIC.mean``, ``METRIC.delta`` (and ``.low``, ``.high``, ``.p``), ``time/step_seconds.ratio``, and more:
:func:`figures` has them all. ``LABEL:NAME`` chooses a group. Without a label, every group but the baseline is checked,
and one that meets the condition suffices. A missing number fails too, with the reason. Withheld numbers, such as the
step times of a busy machine, are missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sparsebp_cli.compare.comparison import Comparison, Group
from sparsebp_cli.compare.expression import Condition, parse
from sparsebp_cli.compare.overview_grid import over_shared_seeds
from sparsebp_cli.compare.statistics import Difference
from sparsebp_cli.errors import UsageError, did_you_mean
from sparsebp_cli.run import metric


@dataclass(frozen=True)
class Failure:
    """A group that meets the condition to fail, and the failure in one line."""

    label: str
    text: str


def check(comparison: Comparison, expression: str) -> list[Failure]:
    """Return a failure for each group that meets the condition, or that lacks a needed number. Raise ``UsageError`` if
    the condition cannot be read, names an unknown number or group, or there is nothing to check."""
    condition = parse(expression, "--fail-if")
    labels = _check_names(comparison, condition)
    groups = [group for group in comparison.groups if not group.baseline]
    if not groups:
        raise UsageError("--fail-if needs a group to check, but only the baseline was selected")
    tables = {group.label: figures(comparison, group) for group in comparison.groups}
    failures = []
    # A condition that names its groups gives the same result for every group, so test it once.
    for group in groups if not labels else groups[:1]:
        holds = condition.holds(partial(_find, tables, group.label))
        shown = ", ".join(_show(name, group.label, tables) for name in dict.fromkeys(condition.names))
        where = "" if labels else f"{group.label}: "
        if holds is None:
            failures.append(Failure(group.label, f"{where}cannot be decided ({shown}): {expression}"))
        elif holds:
            failures.append(Failure(group.label, f"{where}{shown}: {expression}"))
    return failures


def figures(comparison: Comparison, group: Group) -> dict[str, object]:
    """Return every number of a group by its name in conditions; None if it is missing."""
    quality, speed, cost = group.quality, group.speed, group.cost
    final = over_shared_seeds(comparison, group)
    statement = group.find("quality")
    executed = cost.executed_flops / cost.dense_flops if cost.executed_flops and cost.dense_flops else None
    found: dict[str, object] = {
        f"{comparison.metric}.mean": final.mean if final else None,
        f"{comparison.metric}.sd": final.sd if final else None,
        f"{comparison.metric}.n": final.n if final else 0,
        **_of_difference(f"{comparison.metric}.delta", quality.difference),
        "outcome": statement.outcome if statement else None,
        "margin.answer": quality.not_worse.answer if quality.not_worse else None,
        "margin.equivalent": quality.not_worse.equivalent if quality.not_worse else None,
        "margin.anytime": quality.not_worse.anytime if quality.not_worse else None,
        f"{metric.STEP_SECONDS.name}.median": speed.step.median if speed.step else None,
        **_of_difference(f"{metric.STEP_SECONDS.name}.ratio", speed.step_ratio),
        **_of_difference("cost", speed.cost),
        "cost/step": speed.relative_cost,
        "speed/limit": speed.limit,
        "speed/reached": speed.reached,
        # The names of 0.5, kept for one release.
        metric.LIMIT.name: speed.limit,
        metric.REACHED_SHARE.name: speed.reached,
        "memory/peak_bytes": cost.peak_bytes,
        "memory/held_bytes": cost.held_bytes,
        **_of_difference("memory/held_bytes.ratio", cost.held_ratio),
        f"{metric.BACKWARD_EXECUTED.name}.share": executed,
        f"{metric.KEPT_SHARE.name}": cost.kept_share,
        f"{metric.COSINE.name}": cost.cosine,
        f"{metric.RELATIVE_ERROR.name}": cost.relative_error,
        f"{metric.NOISE_RATIO.name}": cost.noise_ratio,
        "runs.finished": group.states.get("finished", 0),
        "runs.not_finished": sum(count for state, count in group.states.items() if state != "finished"),
    }
    return found


def _of_difference(name: str, difference: Difference | None) -> dict[str, object]:
    low, high = difference.shown if difference else (None, None)
    parts = {
        "": difference.mean if difference else None,
        ".low": low,
        ".high": high,
        ".p": difference.decisive_p if difference else None,
        ".n": difference.n if difference else None,
    }
    return {f"{name}{part}": value for part, value in parts.items()}


def _check_names(comparison: Comparison, condition: Condition) -> list[str]:
    """Return the labels in the condition. Raise ``UsageError`` for an unknown label or number."""
    known, labels = figures(comparison, comparison.groups[0]), [group.label for group in comparison.groups]
    named = []
    for name in condition.names:
        label, _, figure = name.rpartition(":")
        if label and label not in labels:
            raise UsageError(f"--fail-if: no group is called {label!r}; the groups are {', '.join(labels)}")
        if figure not in known:
            near = did_you_mean(figure, known)
            raise UsageError(f"--fail-if: unknown number {figure!r}, allowed: {', '.join(known)}{near}")
        named += [label] if label else []
    plain = sum(":" not in name for name in condition.names)
    if named and plain:
        raise UsageError("--fail-if: write 'GROUP:' before every name, as in 'topk:eval/loss.mean', or before none")
    return named


def _find(tables: dict[str, dict[str, object]], label: str, name: str) -> Sequence[object]:
    named, _, figure = name.rpartition(":")
    value = tables[named or label][figure]
    return [] if value is None or (isinstance(value, float) and math.isnan(value)) else [value]


def _show(name: str, label: str, tables: dict[str, dict[str, object]]) -> str:
    found = _find(tables, label, name)
    if not found:
        return f"{name} is not known"
    return f"{name} is {found[0]:.4g}" if isinstance(found[0], int | float) else f"{name} is {found[0]}"
