"""What becomes of the leaves: which of them are worth a gradient at all."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsebp_cli.auditor.parameter import ParameterHistory
from sparsebp_cli.auditor.runner import InputGradient
from sparsebp_cli.auditor.session import Session
from sparsebp_cli.auditor.storage import has_died

FEWEST_STEPS = 2  # a first step may well have a learning rate of zero: schedules with warm-up begin so
EXACT = ("unheld", "zero-rate", "unread-leaf")


@dataclass
class Verdict:
    """Leaves by what is wrong with them; those of which nothing is wrong are in none.

    Args:
        bits: Sets of leaves by kind of finding.
        names: Of the parameters among them.
        without_gradient: Parameters of an optimizer that no gradient ever reached.
        is_judged: Whether enough steps were seen.
    """

    bits: dict[str, int] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    without_gradient: list[str] = field(default_factory=list)
    is_judged: bool = True

    @property
    def useless(self) -> int:
        """All leaves whose gradient can be left out exactly."""
        found = 0
        for kind in EXACT:
            found |= self.bits.get(kind, 0)
        return found

    def kind_of(self, leaves: int) -> str | None:
        """Return the finding that work for some leaves belongs to.

        Args:
            leaves: A set of leaves.

        Returns:
            A kind; None when the work is needed.
        """
        if leaves and not leaves & ~self.useless:
            return next(kind for kind in EXACT if leaves & self.bits.get(kind, 0))
        return next((kind for kind, bits in self.bits.items() if leaves and not leaves & ~bits), None)


def judge_leaves(session: Session) -> Verdict:
    """Judge every leaf.

    Args:
        session: That has ended.

    Returns:
        What was found.
    """
    parameters, verdict = session.parameters, Verdict()
    verdict.is_judged = parameters.num_steps >= FEWEST_STEPS
    collected = 0
    for one in session.passes:
        collected |= one.collected
    if verdict.is_judged:
        for fate in parameters.fates.values():
            kind = _kind_of(fate, collected & ~parameters.captured, session.watch.looks.looked_at)
            if kind == "":
                verdict.without_gradient.append(fate.name)
            elif kind is not None:
                verdict.bits[kind] = verdict.bits.get(kind, 0) | fate.bit
                verdict.names.setdefault(kind, []).append(fate.name)
    unread = _find_unread(session)
    if unread:
        verdict.bits["unread-leaf"] = unread
    return verdict


def _kind_of(fate: ParameterHistory, collected: int, looked_at: int) -> str | None:
    """None: it is as it should be. Empty: no gradient ever came."""
    if fate.steps and not fate.steps_with_gradient:
        return "" if fate.tensor.requires_grad and not fate.bit & collected else None
    if not fate.bit & collected or fate.has_moved:
        return None
    if not fate.steps:
        return None if fate.bit & looked_at else "unheld"  # such as the half copies of weights that are updated
    seen = (
        ("zero-rate", fate.steps_with_gradient, fate.steps_with_rate),
        ("zero-gradient", fate.steps_with_rate, fate.chances),
        ("lost-update", fate.chances, 0),
    )
    return next((kind for kind, steps, others in seen if steps >= FEWEST_STEPS and not others), None)


def _find_unread(session: Session) -> int:
    """Inputs whose gradient nobody read before it died; that of the last pass may still be read."""
    died, kept = 0, 0
    by_bit: dict[int, list[InputGradient]] = {}
    for one in session.runner.inputs:
        if one.reference is not None:
            by_bit.setdefault(one.bit, []).append(one)
    for bit, found in by_bit.items():
        *earlier, last = found
        for one in found:
            if one.key in session.watch.looks.read:
                kept |= bit
            elif one.reference is not None and has_died(one.reference):
                died |= bit
            elif one is not last or any(other.key == one.key for other in earlier):
                kept |= bit
    return died & ~kept
