"""Define the phases of a training: which policies act from which optimizer step on. Without a schedule there is one."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")  # a policy: the schema's PolicyEntry, or the mapping in a stored recipe


@dataclass(frozen=True)
class PolicyPhase(Generic[Entry]):
    """A part of a training with its own policies."""

    policies: Sequence[Entry]
    until: float | None  # fraction of the training at which it ends; None: it lasts to the end
    first: int  # its first optimizer step, counted from 0
    end: int  # the step after its last one
    key: tuple[str | int, ...]  # the key of its policies in the recipe

    @property
    def num_steps(self) -> int:
        """The number of its optimizer steps; 0 if the training is too short for it."""
        return self.end - self.first


Phases = Sequence[PolicyPhase[Entry]]


def is_dense(phases: Phases[dict[str, Any]]) -> bool:
    """Return whether every phase of a stored recipe trains without a policy."""
    return all(entry["name"] == "dense" for phase in phases for entry in phase.policies)


def lay_out(
    policies: Sequence[Entry], schedule: Sequence[tuple[float | None, Sequence[Entry]]] | None, max_steps: int
) -> list[PolicyPhase[Entry]]:
    """Return the phases of a training of ``max_steps``. A schedule gives each phase's ``until`` and policies; without
    one there is a single phase of all steps. A phase ends at the step nearest to its fraction of the training."""
    if schedule is None:
        return [PolicyPhase(policies, None, 0, max_steps, ("policy",))]
    phases: list[PolicyPhase[Entry]] = []
    for number, (until, entries) in enumerate(schedule):
        first = phases[-1].end if phases else 0
        end = max_steps if until is None else max(first, round(until * max_steps))
        phases.append(PolicyPhase(entries, until, first, end, ("schedule", number, "policy")))
    return phases


def find_wrong_end(ends: Sequence[float | None]) -> tuple[int, str] | None:
    """Return the index of the first phase with a wrong ``until``, and what is wrong; None if all are right. Each is a
    fraction in (0, 1) above the previous phase's; the last phase has none."""
    before = 0.0
    for number, until in enumerate(ends):
        is_last = number == len(ends) - 1
        if is_last and until is not None:
            return number, f"the last phase lasts to the end of the training: leave its until out, got {until:g}"
        if not is_last and until is None:
            return number, "until is missing: give the fraction of the training at which this phase ends, in (0, 1)"
        if until is not None and until <= before:
            return number, f"must be above {before:g}, the end of the previous phase, got {until:g}"
        before = until or before
    return None


def find_empty(phases: Phases[Entry], key: str) -> Iterator[tuple[int, str]]:
    """Yield each phase that gets no step: the index of the phase to change, and what is wrong. ``key`` is the key that
    gives the number of steps."""
    for number, phase in enumerate(phases):
        if phase.num_steps == 0:
            # If the last phase is empty, the phase before it ends too late.
            at = number if phase.until is not None else number - 1
            yield at, f"{phases[at].until:g} leaves phase {number} without a step, because {key} is {phases[-1].end}"


def read_phases(recipe: Mapping[str, Any]) -> list[PolicyPhase[dict[str, Any]]]:
    """Return the phases of a stored recipe without validating it. Raise LookupError, TypeError or AttributeError if the
    needed parts are damaged."""
    schedule = recipe.get("schedule")
    given = None if schedule is None else [(phase.get("until"), phase["policy"]) for phase in schedule]
    return lay_out(recipe["policy"] if given is None else (), given, recipe["training"]["max_steps"])


def find_phase(phases: Phases[Entry], step: int) -> int:
    """Return the index of the phase with an optimizer step (from 0). For later steps, return the last step's phase."""
    last = phases[-1].end - 1
    return next(number for number, phase in enumerate(phases) if min(step, last) < phase.end)


def split_series(series: Mapping[int, float], phases: Phases[Entry]) -> dict[int, array[float]]:
    """Return a metric's values by phase index. ``series`` maps ascending optimizer steps (from 1) to values, measured
    at or before the step."""
    found: dict[int, array[float]] = {}
    for step, value in series.items():
        found.setdefault(find_phase(phases, step - 1), array("d")).append(value)
    return found


def weigh(values: Mapping[int, float], phases: Phases[Entry], *, is_speedup: bool = False) -> float:
    """Return the mean of values by phase index, weighted with the phases' steps. Phases without a value are left out.
    For speed-ups, average their inverses, because the cost is the denominator."""
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
    """Return ``reduce`` of a metric's values; with a schedule, the mean of the phases' reductions, weighted by steps.
    Return None without values."""
    found = {number: reduce(values) for number, values in split_series(series, phases).items()}
    return weigh(found, phases, is_speedup=is_speedup) if found else None


def describe_phases(phases: Phases[Entry], describe: Callable[[Entry], str]) -> str:
    """Return the policies of all phases in one line: ``topk until 0.4, dense``. Several policies of one phase are
    joined by ``+``, or by commas if there is only one phase."""
    joint = " + " if len(phases) > 1 else ", "
    texts = [joint.join(map(describe, phase.policies)) or "dense" for phase in phases]
    ends = ["" if phase.until is None else f" until {phase.until:g}" for phase in phases]
    return ", ".join(text + end for text, end in zip(texts, ends, strict=True))
