"""The table of combinations that are refused although each of their parts is valid by itself, and why.

It has the rules about options, about what kinds have in common, and the limits that each kind declares. What no rule
refuses works; ``tests/composition`` checks both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from sparsebp_cli.composition.loop_table import OWN_LOOP, make_compiled_rules, make_trainer_rules
from sparsebp_cli.composition.option_table import OPTIONS
from sparsebp_cli.composition.phase_table import make_phase_rules
from sparsebp_cli.policy.kind import Kind
from sparsebp_cli.policy.known_kind import ASPECTS, KnownKinds, find_kinds
from sparsebp_cli.policy.rule import GIVEN, SAME, Conditions, Rule, one_process, whole_weights


def make_rules(known: KnownKinds) -> tuple[Rule, ...]:
    """Return the table for some kinds. The first rule that applies is the sentence that a user reads."""
    names = [kind.name for kind in known.kinds]
    shortens = _of(known, lambda kind: kind.shortens)
    without_backward = _of(known, lambda kind: not kind.has_backward)
    chooses = _of(known, lambda kind: kind.chooses_targets)
    rules = (
        *_make_common_rules(known),
        *(rule for kind in (*ASPECTS, *known.kinds) for rule in kind.rules),
        *_make_backward_rules(without_backward),
        whole_weights(facts=shortens),
        *make_phase_rules(shortens),
        *OPTIONS,
        *OWN_LOOP,
        *make_compiled_rules(shortens, without_backward),
        *make_trainer_rules(shortens, chooses),
    )
    return tuple(rule.resolve(names) for rule in rules)


def _of(known: KnownKinds, has: Callable[[Kind], bool]) -> Conditions:
    """Return the condition that a policy is of one of the kinds that have something."""
    return {"kind": tuple(kind.name for kind in known.kinds if has(kind))}


def _make_common_rules(known: KnownKinds) -> tuple[Rule, ...]:
    broken = f"; {'; '.join(known.problems)}" if known.problems else ""
    return (
        Rule(
            "{policy}: its kind is not built; built: "
            + ", ".join(kind.name for kind in known.kinds)
            + broken.replace("{", "{{").replace("}", "}}"),
            policy={"kind": ("",)},
        ),
        Rule(
            "{other} and {policy} make the same decision ({kind}) at the same place: give one of them",
            policy=_of(known, lambda kind: not kind.may_repeat),
            other={"kind": SAME},
        ),
        one_process(
            "Each process observes its own examples, and their states would part.",
            what="{policy} keeps a state from what it observes: it",
            facts={"observes": (True,)},
        ),
        Rule(
            "{policy} keeps a state, which a {kind} is not given",
            policy={"stateful": (True,), **_of(known, lambda kind: not kind.keeps_state)},
        ),
        Rule(
            "{policy} asks for trial passes, which are built for block droppers, layer samplers, part selectors and "
            "input savers alone",
            policy={
                "has_trials": (True,),
                "samples_layers": (False,),
                **_of(known, lambda kind: not kind.makes_trials),
            },
        ),
        Rule(
            "{policy} observes gradients of parameters, which {update} frees during the backward; use "
            "{update:deferred}",
            policy={"reads_gradients": (True,)},
            options={"update": ("eager",)},
        ),
        Rule(
            "{policy} sets learning rates, which {update} reads before the backward; use {update:deferred}",
            policy={"sets_rates": (True,)},
            options={"update": ("eager",)},
        ),
    )


def _make_backward_rules(without: Conditions) -> tuple[Rule, ...]:
    """Return the rules of kinds that estimate gradients without a backward."""
    return (
        Rule(
            "{policy} has no backward, and so no sites: needs {sites:linears}, got {sites:=}",
            policy=without,
            options={"sites": ("branches", "nodes")},
        ),
        Rule(
            "{policy} has no backward: needs {update:deferred}, got {update:=}",
            policy=without,
            options={"update": ("eager",)},
        ),
        Rule(
            "{policy} has no backward, for which {segments} computes layers again: leave it out",
            policy=without,
            options={"segments": GIVEN},
        ),
        Rule(
            "{policy} has no backward, for which {checkpointing} computes layers again: needs {checkpointing:none}",
            policy=without,
            options={"checkpointing": ("full", "sparse")},
        ),
        Rule(
            "{policy} with {float8} is not built: weights are shifted by less than float8 rounds",
            policy=without,
            options={"float8": GIVEN},
        ),
        one_process("DDP and FSDP sum gradients inside of the backward.", facts=without),
        Rule(
            "{policy} keeps a state, which is not built for a policy that estimates gradients",
            policy={**without, "stateful": (True,)},
        ),
    )


@lru_cache(maxsize=8)
def _find_rules(known: KnownKinds) -> tuple[Rule, ...]:
    return make_rules(known)


def find_rules() -> tuple[Rule, ...]:
    """Return the table for the kinds of this installation."""
    return _find_rules(find_kinds())
