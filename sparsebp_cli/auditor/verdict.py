"""Judges the leaves: which of them need a gradient at all."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsebp_cli.auditor.parameter import ParameterHistory
from sparsebp_cli.auditor.runner import InputGradient
from sparsebp_cli.auditor.session import Session
from sparsebp_cli.auditor.storage import has_died

FEWEST_STEPS = 2  # the first step may have a learning rate of zero, as in schedules with warm-up
EXACT = ("unheld", "zero-rate", "unread-leaf")


@dataclass
class Verdict:
    """Leaves by finding; needed leaves are in none."""

    bits: dict[str, int] = field(default_factory=dict)  # sets of leaves by kind of finding
    names: dict[str, list[str]] = field(default_factory=dict)  # of the parameters among them
    without_gradient: list[str] = field(default_factory=list)  # parameters of an optimizer that never got a gradient
    is_judged: bool = True  # whether enough steps were seen

    @property
    def useless(self) -> int:
        """All leaves whose gradient can be omitted without changing any used result."""
        found = 0
        for kind in EXACT:
            found |= self.bits.get(kind, 0)
        return found

    def kind_of(self, leaves: int) -> str | None:
        """Return the finding that work for some leaves belongs to; None if the work is needed."""
        if leaves and not leaves & ~self.useless:
            return next(kind for kind in EXACT if leaves & self.bits.get(kind, 0))
        return next((kind for kind, bits in self.bits.items() if leaves and not leaves & ~bits), None)


def judge_leaves(session: Session) -> Verdict:
    """Judge every leaf of a session that has ended."""
    parameters, verdict = session.parameters, Verdict()
    verdict.is_judged = parameters.num_steps >= FEWEST_STEPS
    collected = 0
    for one in session.passes:
        collected |= one.collected
    if verdict.is_judged:
        for history in parameters.histories.values():
            kind = _kind_of(history, collected & ~parameters.captured, session.watch.gradient_reads.read_elsewhere)
            if kind == "":
                verdict.without_gradient.append(history.name)
            elif kind is not None:
                verdict.bits[kind] = verdict.bits.get(kind, 0) | history.bit
                verdict.names.setdefault(kind, []).append(history.name)
    unread = _find_unread(session)
    if unread:
        verdict.bits["unread-leaf"] = unread
    return verdict


def _kind_of(history: ParameterHistory, collected: int, read_elsewhere: int) -> str | None:
    """Return the finding of a parameter: None if its gradient is needed, empty if it never got one."""
    if history.steps and not history.steps_with_gradient:
        return "" if history.tensor.requires_grad and not history.bit & collected else None
    if not history.bit & collected or history.has_moved:
        return None
    if not history.steps:
        return (
            None if history.bit & read_elsewhere else "unheld"
        )  # low-precision copies of trained weights are read, not held
    seen = (
        ("zero-rate", history.steps_with_gradient, history.steps_with_rate),
        ("zero-gradient", history.steps_with_rate, history.steps_with_nonzero),
        ("lost-update", history.steps_with_nonzero, 0),
    )
    return next((kind for kind, steps, others in seen if steps >= FEWEST_STEPS and not others), None)


def _find_unread(session: Session) -> int:
    """Return inputs whose gradient nothing read before it was freed; that of the last pass may still be read."""
    died, kept = 0, 0
    by_bit: dict[int, list[InputGradient]] = {}
    for one in session.runner.inputs:
        if one.reference is not None:
            by_bit.setdefault(one.bit, []).append(one)
    for bit, found in by_bit.items():
        *earlier, last = found
        for one in found:
            if one.key in session.watch.gradient_reads.read:
                kept |= bit
            elif one.reference is not None and has_died(one.reference):
                died |= bit
            elif one is not last or any(other.key == one.key for other in earlier):
                kept |= bit
    return died & ~kept
