"""List the combinations that are refused although each part alone is valid, and why.

The table has rules about options, rules about properties of kinds, and the limits that each kind declares. A
combination that no rule refuses works; ``tests/composition`` checks both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from sparsebp_cli.policy.composition.loop_table import OWN_LOOP, make_compiled_rules, make_trainer_rules
from sparsebp_cli.policy.composition.option_table import OPTIONS
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.known_kind import KnownKinds, find_kinds
from sparsebp_cli.policy.rule import SAME, Conditions, Rule, one_process, whole_weights


def make_rules(known: KnownKinds) -> tuple[Rule, ...]:
    """Return the table for the given kinds. Users see the message of the first rule that applies."""
    names = [kind.name for kind in known.kinds]
    shortens = _of(known, lambda kind: kind.shortens)
    chooses = _of(known, lambda kind: kind.chooses_targets)
    rules = (
        *_make_common_rules(known),
        *(rule for kind in (*known.aspects, *known.kinds) for rule in kind.rules),
        whole_weights(facts=shortens),
        *OPTIONS,
        *OWN_LOOP,
        *make_compiled_rules(shortens),
        *make_trainer_rules(shortens, chooses),
    )
    return tuple(rule.resolve(names) for rule in rules)


def _of(known: KnownKinds, has: Callable[[Kind], bool]) -> Conditions:
    """Return the condition that a policy's kind satisfies ``has``."""
    return {"kind": tuple(kind.name for kind in known.kinds if has(kind))}


def _make_common_rules(known: KnownKinds) -> tuple[Rule, ...]:
    broken = f"; {'; '.join(known.problems)}" if known.problems else ""
    return (
        Rule(
            "{policy} must derive from an installed kind of policy; a package adds kinds by the entry-point "
            "group sparsebp.kinds. Installed: "
            + ", ".join(kind.name for kind in known.kinds)
            + broken.replace("{", "{{").replace("}", "}}"),
            policy={"kind": ("",)},
        ),
        Rule(
            "{other} and {policy} make the same decision ({kind}) at the same place: give only one of them",
            policy=_of(known, lambda kind: not kind.may_repeat),
            other={"kind": SAME},
        ),
        one_process(
            "Each process observes its own examples, so the states of the processes would differ.",
            what="{policy} keeps a state from what it observes: it",
            facts={"observes": (True,)},
        ),
        Rule(
            "{policy} keeps a state, but SparseBP supports no state for a {kind}",
            policy={"stateful": (True,), **_of(known, lambda kind: not kind.keeps_state)},
        ),
        Rule(
            "{policy} requests trial passes, which only block droppers, layer samplers, part selectors and input "
            "savers support",
            policy={
                "has_trials": (True,),
                **{aspect.fact: (False,) for aspect in known.aspects if aspect.makes_trials},
                **_of(known, lambda kind: not kind.makes_trials),
            },
        ),
        Rule(
            "{policy} observes gradients of parameters, which {update} frees during the backward; use "
            "{update:deferred}",
            policy={"reads_gradients": (True,)},
            options={"update": ("eager",)},
        ),
    )


@lru_cache(maxsize=8)
def _find_rules(known: KnownKinds) -> tuple[Rule, ...]:
    return make_rules(known)


def find_rules() -> tuple[Rule, ...]:
    """Return the table for the installed kinds."""
    return _find_rules(find_kinds())
