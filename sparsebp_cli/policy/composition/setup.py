"""Check a combination of policies and options against the table, in the user's spelling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import ParameterGradient, Policy, Stateful
from sparsebp_cli.policy.composition.table import find_rules
from sparsebp_cli.policy.known_kind import find_facts
from sparsebp_cli.policy.rule import AllBut, Condition, Match, Rule

_UNKNOWN = object()  # the value of an option that this caller does not have: rules about it do not apply
Spelling = Callable[[str, object], str]


@dataclass(frozen=True)
class PolicyFacts:
    """The facts of a policy that the table's rules use."""

    label: str  # the policy's name in a message
    facts: Mapping[str, object]  # its kind, and what its contract declares for its options
    place: str = ""  # its place, for messages about two policies; may be empty

    @classmethod
    def of(cls, policy: Policy, label: str = "", place: str = "") -> Self:
        """Return the facts of a policy. An empty label means the name of its class."""
        facts = {
            **find_facts(policy),
            "observes": isinstance(policy, Stateful) and not policy.is_identical,
            "stateful": isinstance(policy, Stateful),
            "has_trials": isinstance(policy, Stateful) and policy.has_trials,
            "reads_gradients": _reads_gradients(policy),
        }
        return cls(label or (type(policy).__name__ if facts["kind"] else f"policy {policy!r}"), facts, place)


def _reads_gradients(policy: Policy) -> bool:
    """Return whether a policy reads parameter gradients at the end of a step, not only in trial passes."""
    if not isinstance(policy, Stateful) or policy.has_trials:
        return False
    return ParameterGradient in policy.observes


def _format_argument(name: str, value: object) -> str:
    """Format an option as an argument of a Python call."""
    return f"{name}={value!r}" if name else repr(value)


@dataclass(frozen=True)
class Setup:
    """Policies and options to be combined."""

    policies: Sequence[PolicyFacts]
    # by name; rules about a missing option do not apply, because the caller cannot choose it
    options: Mapping[str, object]
    # formats an option and its value in the reader's notation; with an empty name, only the value
    spell: Spelling = _format_argument
    words: Mapping[str, str] = field(default_factory=dict)  # options with a special spelling, by name


@dataclass(frozen=True)
class Refusal:
    """A rule that refuses a setup."""

    rule: Rule
    text: str  # the rule's message with its fields filled in
    policy: int | None = None  # index of the policy that the rule refuses; None for a rule about options alone


def find_refusals(setup: Setup) -> Iterator[Refusal]:
    """Yield every rule that applies, in the order of the table."""
    for rule in find_rules():
        if not all(_holds(wanted, setup.options.get(name, _UNKNOWN)) for name, wanted in rule.options.items()):
            continue
        if not rule.policy:
            yield Refusal(rule, _fill(rule, setup))
        for number, policy in enumerate(setup.policies if rule.policy else ()):
            if not rule.other:
                if _matches(rule.policy, policy):
                    yield Refusal(rule, _fill(rule, setup, policy), number)
            elif (other := _find_other(rule, policy, setup.policies[:number])) is not None:
                yield Refusal(rule, _fill(rule, setup, policy, other), number)


def _find_other(rule: Rule, policy: PolicyFacts, before: Sequence[PolicyFacts]) -> PolicyFacts | None:
    """Return the first earlier policy that the rule refuses together with this policy."""
    for other in before:
        for one, two in ((policy, other), (other, policy)):
            if _matches(rule.policy, one) and _matches(rule.other, two, one):
                return other
    return None


def refuse(setup: Setup) -> None:
    """Raise UnsupportedError for the first rule that applies."""
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
    assert not isinstance(condition, AllBut), "resolved by make_rules"
    if isinstance(condition, tuple):
        return value in condition
    if condition is Match.SEVERAL:
        return isinstance(value, int) and value > 1
    return (value is None) == (condition is Match.ABSENT)


@dataclass(frozen=True)
class _Option:
    """An option in a message: ``{sites}``; ``{sites:nodes}`` with another value; ``{sites:=}`` only its value."""

    name: str
    setup: Setup

    def __format__(self, form: str) -> str:
        value = self.setup.options.get(self.name)
        if not form and self.name in self.setup.words:
            return self.setup.words[self.name]
        if form == "=":
            return self.setup.spell("", value)
        if form:
            other: object = {"null": None}.get(form, int(form) if form.isdigit() else form)
            return self.setup.spell(self.name, other)
        return self.setup.spell(self.name, value)


class _Fields(dict[str, object]):
    """The fields of a message: policies by their role, and any option."""

    def __init__(self, fields: Mapping[str, object], setup: Setup) -> None:
        super().__init__(fields)
        self._setup = setup

    def __missing__(self, name: str) -> object:
        return _Option(name, self._setup)


def _fill(rule: Rule, setup: Setup, policy: PolicyFacts | None = None, other: PolicyFacts | None = None) -> str:
    fields: dict[str, object] = {}
    if policy is not None:
        fields |= {"policy": policy.label, "kind": policy.facts["kind"]}
    if other is not None:
        fields["other"] = f"{other.label} ({other.place})" if other.place else other.label
    return rule.text.format_map(_Fields(fields, setup))
