"""Rules about unsupported combinations, and functions that make the most common ones.

A rule is data. It refers to options and to facts that a policy declares by its contract, such as its kind. It never
refers to a policy by name. Kinds declare the rules that limit them; ``policy.composition`` declares the rules about
options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias


class Match(Enum):
    """Conditions on a value other than a list of values."""

    GIVEN = "given"
    ABSENT = "null"
    SEVERAL = "2 or more"
    SAME = "the same"  # equals the other policy's fact


@dataclass(frozen=True)
class AllBut:
    """A condition that every known kind meets, with exceptions.

    Args:
        kinds: Names of the kinds that do not meet it.
    """

    kinds: tuple[str, ...]


GIVEN, ABSENT, SEVERAL, SAME = Match
Condition: TypeAlias = tuple[object, ...] | Match | AllBut
Conditions: TypeAlias = Mapping[str, Condition]
NONE: Conditions = {}


@dataclass(frozen=True)
class Rule:
    """One combination that is refused.

    Args:
        text: The error message. ``{policy}`` and ``{other}`` are the policies' names, ``{kind}`` is the kind of
            ``{policy}``. ``{sites}`` is the option with its value in the reader's notation, ``{sites:nodes}`` the
            option with another value, ``{sites:=}`` the value alone.
        why: Reason, for the documentation; empty if ``text`` contains it.
        policy: Facts of a policy with the values that are refused.
        other: Facts of another policy with the values that are refused. Both orders match; ``{policy}`` is the later.
        options: Options with the values that are refused.
        blame: The option that the error of a recipe points at; empty: the policy's name.
    """

    text: str
    why: str = ""
    policy: Conditions = field(default_factory=dict)
    other: Conditions = field(default_factory=dict)
    options: Conditions = field(default_factory=dict)
    blame: str = ""

    def resolve(self, kinds: Sequence[str]) -> Rule:
        """Return the rule with each :class:`AllBut` replaced by names of kinds, out of all known ones."""
        return replace(self, policy=_resolve(self.policy, kinds), other=_resolve(self.other, kinds))


def _resolve(conditions: Conditions, kinds: Sequence[str]) -> Conditions:
    return {
        name: tuple(kind for kind in kinds if kind not in wanted.kinds) if isinstance(wanted, AllBut) else wanted
        for name, wanted in conditions.items()
    }


# Functions for the most common limits of a kind. ``Kind.rules`` adds the condition on the kind; ``facts`` are further
# conditions on its policies.


def at_linears(why: str = "", *, does: str = "", facts: Conditions = NONE) -> Rule:
    """Refuse other sites than linears.

    Args:
        why: Reason, for the documentation; empty: none is given.
        does: Words after the policy's name that say what it does: ``" saves inputs of linears:"``.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    text = f"{{policy}}{does} needs {{sites:linears}}, got {{sites:=}}"
    return Rule(text, why, facts, options={"sites": ("nodes",)})


def not_with(option: str, condition: Condition, because: str, *, facts: Conditions = NONE) -> Rule:
    """Refuse an option.

    Args:
        option: Its name in the table.
        condition: Values that are refused.
        because: Reason, as the end of the sentence.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    return Rule(f"{{policy}} with {{{option}}} is not supported: {because}", policy=facts, options={option: condition})


def needs(option: str, value: str, got: tuple[object, ...], because: str) -> Rule:
    """Refuse all values of an option but one.

    Args:
        option: Its name in the table.
        value: The value that is needed.
        got: Values that are refused.
        because: Reason, as the end of the sentence.

    Returns:
        The rule.
    """
    return Rule(f"{{policy}} needs {{{option}:{value}}}, got {{{option}:=}}: {because}", options={option: got})


def whole_weights(because: str = "sharded weights are not supported", *, facts: Conditions = NONE) -> Rule:
    """Refuse weights that FSDP2 shards. The message ends with ``because``. ``facts`` select the policies that are
    refused; empty: all of the kind."""
    return Rule(f"{{policy}} needs {{sharding:none}}: {because}", policy=facts, options={"sharding": ("fsdp2",)})


def one_process(why: str, *, what: str = "{policy}", facts: Conditions = NONE) -> Rule:
    """Refuse several processes. The message has the subject ``what``; the documentation adds ``why``. ``facts`` select
    the policies that are refused; empty: all of the kind."""
    return Rule(f"{what} works in one process, got {{processes}}", why, facts, options={"processes": SEVERAL})


def not_compiled(because: str, *, what: str = "{policy}", facts: Conditions = NONE) -> Rule:
    """Refuse a model that torch.compile has wrapped. The message has the subject ``what`` and ends with ``because``.
    ``facts`` select the policies that are refused; empty: all of the kind."""
    text = f"{what} is not supported with torch.compile: {because}"
    return Rule(text, policy=facts, options={"wrapped": ("compiled",)})


def needs_optimizer(because: str, *, what: str = "{policy}", facts: Conditions = NONE) -> Rule:
    """Refuse a user's own training loop that does not pass the optimizer. The message has the subject ``what`` and ends
    with ``because``. ``facts`` select the policies that are refused; empty: all of the kind."""
    text = f"{what} needs attach(optimizer=...): {because}"
    return Rule(text, policy=facts, options={"optimizer": ABSENT, "loop": ("own",)})


def not_in_trainer(text: str) -> Rule:
    """Refuse a transformers.Trainer.

    Args:
        text: The error message, with ``{policy}`` for the policy's name.

    Returns:
        The rule.
    """
    return Rule(text, options={"loop": ("trainer",)})


def in_trainer_not_with(option: str, condition: Condition, what: str, *, facts: Conditions = NONE) -> Rule:
    """Refuse an option of a transformers.Trainer.

    Args:
        option: Its name in the table.
        condition: Values that are refused.
        what: The option and the reason, as the end of the sentence.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    text = f"{{policy}} in a transformers.Trainer is not supported with {what}"
    return Rule(text, policy=facts, options={option: condition})


def not_beside(
    kinds: tuple[str, ...] | AllBut,
    why: str,
    *,
    where: str = "forward",
    facts: Conditions = NONE,
    options: Conditions = NONE,
) -> Rule:
    """Refuse certain other policies together with a policy of this kind.

    Args:
        kinds: Names of the other policy's kinds.
        why: Reason, for the documentation.
        where: Part of a step on which both would act: ``forward``, ``backward`` or ``training``.
        facts: Facts of the policies of this kind that are refused; empty: all of them.
        options: Options with which both are refused; empty: any options.

    Returns:
        The rule.
    """
    text = f"{{other}} and {{policy}} in one {where} is not supported: give only one of them"
    return Rule(text, why, facts, {"kind": kinds}, options)
