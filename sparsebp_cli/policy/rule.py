"""A rule about what does not go together: what it refuses, and the shapes that most rules have.

A rule is data. It refers to facts that a policy declares by its contract (its kind, whether its selection changes) and
to options, never to a policy by name. Kinds declare the rules that limit them; ``sparsebp_cli.composition`` has those
of options.
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
    SAME = "the same"  # as the other policy's fact


@dataclass(frozen=True)
class AllBut:
    """A condition on a kind: every known one but these.

    Args:
        kinds: Names of the kinds to which it does not apply.
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
        text: The sentence that is raised. ``{policy}`` and ``{other}`` are the policies' names, ``{kind}`` the first
            one's kind; ``{sites}`` is an option in the reader's notation, ``{sites:nodes}`` the same with another
            value, ``{sites:=}`` the value alone.
        why: Why it is not supported, for the documentation; empty if the text says it.
        policy: Facts of a policy with the values that are refused.
        other: Facts of another policy, in either order; the later one is ``{policy}``.
        options: Options with the values that are refused.
        blame: The option at which a recipe is wrong; empty: the policy's name.
    """

    text: str
    why: str = ""
    policy: Conditions = field(default_factory=dict)
    other: Conditions = field(default_factory=dict)
    options: Conditions = field(default_factory=dict)
    blame: str = ""

    def resolve(self, kinds: Sequence[str]) -> Rule:
        """Return the rule with the kinds that :class:`AllBut` stands for.

        Args:
            kinds: Names of all known kinds.

        Returns:
            The rule, without a condition that depends on what kinds there are.
        """
        return replace(self, policy=_resolve(self.policy, kinds), other=_resolve(self.other, kinds))


def _resolve(conditions: Conditions, kinds: Sequence[str]) -> Conditions:
    return {
        name: tuple(kind for kind in kinds if kind not in wanted.kinds) if isinstance(wanted, AllBut) else wanted
        for name, wanted in conditions.items()
    }


# The shapes that most limits of a kind have. The kind itself is added where it declares them; ``facts`` are conditions
# on its policies beside that.


def at_linears(why: str = "", *, does: str = "", facts: Conditions = NONE) -> Rule:
    """Refuse other sites than linears.

    Args:
        why: Reason, for the documentation; empty: none is given.
        does: Activity of the policy, which goes on after its name: ``" saves inputs of linears:"``.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    text = f"{{policy}}{does} needs {{sites:linears}}, got {{sites:=}}"
    return Rule(text, why, facts, options={"sites": ("branches", "nodes")})


def not_with(option: str, condition: Condition, because: str, *, facts: Conditions = NONE) -> Rule:
    """Refuse an option.

    Args:
        option: Its name in the table.
        condition: Values that are refused.
        because: Why, as the sentence goes on.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    return Rule(f"{{policy}} with {{{option}}} is not built: {because}", policy=facts, options={option: condition})


def needs(option: str, value: str, got: tuple[object, ...], because: str, *, facts: Conditions = NONE) -> Rule:
    """Refuse all values of an option but one.

    Args:
        option: Its name in the table.
        value: The value that is needed.
        got: Values that are refused.
        because: Why, as the sentence goes on.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    text = f"{{policy}} needs {{{option}:{value}}}, got {{{option}:=}}: {because}"
    return Rule(text, policy=facts, options={option: got})


def whole_weights(because: str = "it is not built for sharded weights", *, facts: Conditions = NONE) -> Rule:
    """Refuse weights that FSDP2 shards.

    Args:
        because: Why, as the sentence goes on.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    return Rule(f"{{policy}} needs {{sharding:none}}: {because}", policy=facts, options={"sharding": ("fsdp2",)})


def one_process(why: str, *, what: str = "{policy}", facts: Conditions = NONE) -> Rule:
    """Refuse several processes.

    Args:
        why: Reason, for the documentation.
        what: The sentence's subject.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    return Rule(f"{what} works in one process, got {{processes}}", why, facts, options={"processes": SEVERAL})


def not_compiled(because: str, *, what: str = "{policy}", facts: Conditions = NONE) -> Rule:
    """Refuse a model that torch.compile has wrapped.

    Args:
        because: Why, as the sentence goes on.
        what: The sentence's subject.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    text = f"{what} is not built with torch.compile: {because}"
    return Rule(text, policy=facts, options={"wrapped": ("compiled",)})


def needs_optimizer(because: str, *, what: str = "{policy}", facts: Conditions = NONE) -> Rule:
    """Refuse a loop of the user's own that does not give the optimizer.

    Args:
        because: Why, as the sentence goes on.
        what: The sentence's subject.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    text = f"{what} needs attach(optimizer=...): {because}"
    return Rule(text, policy=facts, options={"optimizer": ABSENT, "loop": ("own",)})


def not_in_trainer(text: str, *, facts: Conditions = NONE) -> Rule:
    """Refuse a transformers.Trainer.

    Args:
        text: The sentence that is raised, with ``{policy}`` for the policy's name.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    return Rule(text, policy=facts, options={"loop": ("trainer",)})


def in_trainer_not_with(option: str, condition: Condition, what: str, *, facts: Conditions = NONE) -> Rule:
    """Refuse an option of a transformers.Trainer.

    Args:
        option: Its name in the table.
        condition: Values that are refused.
        what: The option and why, as the sentence goes on.
        facts: Facts of the policies that are refused; empty: all of the kind.

    Returns:
        The rule.
    """
    text = f"{{policy}} in a transformers.Trainer is not built with {what}"
    return Rule(text, policy=facts, options={option: condition})


def not_beside(
    kinds: tuple[str, ...] | AllBut,
    why: str,
    *,
    where: str = "forward",
    other: Conditions = NONE,
    facts: Conditions = NONE,
    options: Conditions = NONE,
) -> Rule:
    """Refuse another policy beside one of this kind.

    Args:
        kinds: Names of the other policy's kinds.
        why: Reason, for the documentation.
        where: Part of a step on which both would act: ``forward``, ``backward`` or ``training``.
        other: Facts of the other policy beside its kind.
        facts: Facts of the policies of this kind that are refused; empty: all of them.
        options: Options with which both are refused; empty: whatever they are.

    Returns:
        The rule.
    """
    text = f"{{other}} and {{policy}} in one {where} is not built: give one of them"
    return Rule(text, why, facts, {"kind": kinds, **other}, options)
