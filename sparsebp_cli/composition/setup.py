"""What somebody wants to put together, in the words that they wrote it in, held against the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from sparsebp_cli.composition.table import KINDS, ROWS, Condition, Match, Row
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import EdgeRouter, ExampleSelector, GradientSelector, ParameterSelector, Policy, TokenSelector

_CONTRACT: dict[str, type[Policy]] = {
    kind.__name__: kind for kind in (GradientSelector, EdgeRouter, TokenSelector, ExampleSelector, ParameterSelector)
}
_UNKNOWN = object()  # of an option that this caller does not have: no row speaks of it
Spelling = Callable[[str, object], str]


@dataclass(frozen=True)
class PolicyFacts:
    """What the table knows of a policy.

    Args:
        label: What a sentence calls it.
        facts: Its kind, and what its contract declares with its options.
        place: Where it stands, for a sentence about two; may be empty.
    """

    label: str
    facts: Mapping[str, object]
    place: str = ""

    @classmethod
    def of(cls, policy: Policy, label: str = "", place: str = "") -> Self:
        """Ask a policy for its facts.

        Args:
            policy: Any.
            label: What a sentence calls it; empty: its class.
            place: Where it stands.

        Returns:
            The facts.
        """
        kind = next((name for name in KINDS if isinstance(policy, _CONTRACT[name])), "")
        facts: dict[str, object] = {"kind": kind}
        if isinstance(policy, ParameterSelector):
            facts["changes"] = policy.changes
        if isinstance(policy, TokenSelector):
            compares = "reference_loss" in policy.needs
            facts |= {"mode": policy.mode, "compares": compares, "reference": policy.reference}
        return cls(label or (type(policy).__name__ if kind else f"policy {policy!r}"), facts, place)


def _spell_call(name: str, value: object) -> str:
    """Spell an option as a call of Python has it."""
    return f"{name}={value!r}" if name else repr(value)


@dataclass(frozen=True)
class Setup:
    """Policies, and the options beside them.

    Args:
        policies: In their order.
        options: By name. One that is missing is one that nobody can choose here, so no row about it holds.
        spell: Writes an option and a value as the reader writes it; without a name, the value alone.
        words: Options that are written otherwise, by name.
    """

    policies: Sequence[PolicyFacts]
    options: Mapping[str, object]
    spell: Spelling = _spell_call
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """A row of the table that holds.

    Args:
        row: Which.
        text: Its sentence, filled in.
        policy: Number of the policy that it is about; None: it is about options alone.
    """

    row: Row
    text: str
    policy: int | None = None


def find_refusals(setup: Setup) -> Iterator[Refusal]:
    """Find every row that refuses something.

    Args:
        setup: What is to be put together.

    Yields:
        The refusals, in the order of the table.
    """
    for row in ROWS:
        if not all(_holds(wanted, setup.options.get(name, _UNKNOWN)) for name, wanted in row.options.items()):
            continue
        if not row.policy:
            yield Refusal(row, _fill(row, setup))
        for number, policy in enumerate(setup.policies if row.policy else ()):
            if not row.other:
                if _matches(row.policy, policy):
                    yield Refusal(row, _fill(row, setup, policy), number)
            elif (other := _find_other(row, policy, setup.policies[:number])) is not None:
                yield Refusal(row, _fill(row, setup, policy, other), number)


def _find_other(row: Row, policy: PolicyFacts, before: Sequence[PolicyFacts]) -> PolicyFacts | None:
    """Return the first policy before this one that the row refuses beside it."""
    for other in before:
        for one, two in ((policy, other), (other, policy)):
            if _matches(row.policy, one) and _matches(row.other, two, one):
                return other
    return None


def refuse(setup: Setup) -> None:
    """Refuse what is not built.

    Args:
        setup: What is to be put together.

    Raises:
        UnsupportedError: A row of the table refuses it; the first that does.
    """
    for refusal in find_refusals(setup):
        raise UnsupportedError(refusal.text)


def _matches(wanted: Mapping[str, Condition], policy: PolicyFacts, other: PolicyFacts | None = None) -> bool:
    return all(
        (other is not None and policy.facts[name] == other.facts[name])
        if condition is Match.SAME
        else _holds(condition, policy.facts.get(name, _UNKNOWN))
        for name, condition in wanted.items()
    )


def _holds(condition: Condition, value: object) -> bool:
    if value is _UNKNOWN:
        return False
    if isinstance(condition, tuple):
        return value in condition
    if condition is Match.SEVERAL:
        return isinstance(value, int) and value > 1
    return (value is None) == (condition is Match.ABSENT)


@dataclass(frozen=True)
class _Option:
    """An option in a sentence: ``{sites}``, ``{sites:nodes}`` with another value, ``{sites:=}`` the value alone."""

    name: str
    setup: Setup

    def __format__(self, form: str) -> str:
        value = self.setup.options.get(self.name)
        if not form and self.name in self.setup.words:
            return self.setup.words[self.name]
        if form == "=":
            return self.setup.spell("", value)
        if form:
            other: Any = {"null": None}.get(form, int(form) if form.isdigit() else form)
            return self.setup.spell(self.name, other)
        return self.setup.spell(self.name, value)


class _Fields(dict[str, object]):
    """What stands in braces: policies by their role, and any option."""

    def __init__(self, fields: Mapping[str, object], setup: Setup) -> None:
        super().__init__(fields)
        self._setup = setup

    def __missing__(self, name: str) -> object:
        return _Option(name, self._setup)


def _fill(row: Row, setup: Setup, policy: PolicyFacts | None = None, other: PolicyFacts | None = None) -> str:
    fields: dict[str, object] = {}
    if policy is not None:
        fields |= {"policy": policy.label, "kind": policy.facts["kind"]}
    if other is not None:
        fields["other"] = f"{other.label} ({other.place})" if other.place else other.label
    return row.text.format_map(_Fields(fields, setup))
