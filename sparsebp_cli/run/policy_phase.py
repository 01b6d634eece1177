"""The phases of a training: which policies act from which optimizer step on. Without a schedule there is one phase."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")  # a policy: PolicyEntry of the schema, or the mapping that a stored recipe holds


@dataclass(frozen=True)
class PolicyPhase(Generic[Entry]):
    """A part of a training with its own policies."""

    policies: Sequence[Entry]
    until: float | None  # share of the training at which it ends; None: it lasts to the end
    first: int  # the optimizer step, from 0, with which it begins
    end: int  # the step before which it ends
    key: tuple[str | int, ...]  # where the recipe has its policies

    @property
    def num_steps(self) -> int:
        """Its optimizer steps; 0 where the training is too short for it."""
        return self.end - self.first


Phases = Sequence[PolicyPhase[Entry]]


def is_dense(phases: Phases[dict[str, Any]]) -> bool:
    """Whether every phase of a stored recipe trains without a policy."""
    return all(entry["name"] == "dense" for phase in phases for entry in phase.policies)


def lay_out(
    policies: Sequence[Entry], schedule: Sequence[tuple[float | None, Sequence[Entry]]] | None, max_steps: int
) -> list[PolicyPhase[Entry]]:
    """Return the phases of a training of ``max_steps``: those of the schedule, each its ``until`` and its policies, or
    without one a single phase of all steps. A phase ends at the step that is nearest to its share."""
    if schedule is None:
        return [PolicyPhase(policies, None, 0, max_steps, ("policy",))]
    phases: list[PolicyPhase[Entry]] = []
    for number, (until, entries) in enumerate(schedule):
        first = phases[-1].end if phases else 0
        end = max_steps if until is None else max(first, round(until * max_steps))
        phases.append(PolicyPhase(entries, until, first, end, ("schedule", number, "policy")))
    return phases


def find_wrong_end(ends: Sequence[float | None]) -> tuple[int, str] | None:
    """Return the number of the first phase whose ``until`` cannot be, and what is wrong; None if all can. Each is a
    share in (0, 1), above that of the phase before; the last phase has none."""
    before = 0.0
    for number, until in enumerate(ends):
        is_last = number == len(ends) - 1
        if is_last and until is not None:
            return number, f"the last phase lasts to the end of the training and has no until, got {until:g}"
        if not is_last and until is None:
            return number, "until is missing: every phase but the last ends at a share of the training, in (0, 1)"
        if until is not None and until <= before:
            return number, f"must be above {before:g}, at which the phase before ends, got {until:g}"
        before = until or before
    return None


def find_empty(phases: Phases[Entry], key: str) -> Iterator[tuple[int, str]]:
    """Yield the phases that a training is too short for: the number of the one to change, and what is wrong. ``key`` is
    where the number of steps was given."""
    for number, phase in enumerate(phases):
        if phase.num_steps == 0:
            # The last phase begins too late by the end of the one before.
            at = number if phase.until is not None else number - 1
            yield at, f"{phases[at].until:g} leaves phase {number} no step: {key} is {phases[-1].end}"


def read_phases(recipe: Mapping[str, Any]) -> list[PolicyPhase[dict[str, Any]]]:
    """Return the phases of a stored recipe, without its schema. Raise LookupError, TypeError or AttributeError if the
    recipe is damaged there."""
    schedule = recipe.get("schedule")
    given = None if schedule is None else [(phase.get("until"), phase["policy"]) for phase in schedule]
    return lay_out(recipe["policy"] if given is None else (), given, recipe["training"]["max_steps"])


def find_phase(phases: Phases[Entry], step: int) -> int:
    """Return the number of the phase that makes an optimizer step, counted from 0; after the last step, that of the
    last step."""
    last = phases[-1].end - 1
    return next(number for number, phase in enumerate(phases) if min(step, last) < phase.end)


def split_series(series: Mapping[int, float], phases: Phases[Entry]) -> dict[int, array[float]]:
    """Return the values of a metric by the number of the phase whose step they were measured at or before; ``series``
    maps ascending optimizer steps, from 1, to values."""
    found: dict[int, array[float]] = {}
    for step, value in series.items():
        found.setdefault(find_phase(phases, step - 1), array("d")).append(value)
    return found


def weigh(values: Mapping[int, float], phases: Phases[Entry], *, is_speedup: bool = False) -> float:
    """Return the mean of values by number of phase, each weighted with its steps; phases without one are left out.
    Of speed-ups, which have the cost in the denominator, the costs are averaged."""
    if len(values) == 1:
        return next(iter(values.values()))
    if is_speedup:
        return 1.0 / weigh({number: 1.0 / value for number, value in values.items()}, phases)
    steps = {number: phases[number].num_steps for number in values}
    total = sum(steps.values())
    return sum(values[n] * steps[n] for n in values) / total if total else sum(values.values()) / len(values)


def weigh_series(
    series: Mapping[int, float],
    phases: Phases[Entry],
    reduce: Callable[[Sequence[float]], float],
    *,
    is_speedup: bool = False,
) -> float | None:
    """Return one number for a metric: ``reduce`` of its values, or with a schedule the mean of that over the phases.
    None without values."""
    found = {number: reduce(values) for number, values in split_series(series, phases).items()}
    return weigh(found, phases, is_speedup=is_speedup) if found else None


def describe_phases(phases: Phases[Entry], describe: Callable[[Entry], str]) -> str:
    """Return the policies of all phases in one line: ``topk until 0.4, dense``; several of one phase are joined by
    ``+``, and by commas where there is one phase."""
    joint = " + " if len(phases) > 1 else ", "
    texts = [joint.join(map(describe, phase.policies)) or "dense" for phase in phases]
    ends = ["" if phase.until is None else f" until {phase.until:g}" for phase in phases]
    return ", ".join(text + end for text, end in zip(texts, ends, strict=True))
