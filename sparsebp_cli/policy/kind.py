"""What a kind of policy declares of itself: all that the rest of the package knows of it.

A record stands beside the class of each kind, and refers to what imports torch by name alone, so a recipe is checked
without it. ``attach``, the table of combinations, the conformance suites, the worker and the documentation read the
records. A package brings a kind of its own by an entry point in the group ``sparsebp.kinds``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, final

from sparsebp_cli.policy.rule import NONE, Conditions, Rule


def _no_facts(policy: Any) -> Mapping[str, object]:  # noqa: ARG001 - of any policy
    return {}


@final
@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of policy, or an aspect that policies of several kinds may have.

    Args:
        policy: The class that its policies derive from.
        asked: Text for the reference: when its policies decide, and when they are exact and unbiased.
        extensions: (number, ``module:name``) of each callable that takes the policy, the model and a ``Given`` and
            returns an extension of the engine that carries the policy out, or None where it needs none. They change the
            model in the order of the numbers. Empty: the engine itself asks its policies, or the worker does.
        places: ``module:name`` of a function of the same arguments that returns where a policy with state decides;
            empty: nowhere.
        suite: ``module:name`` of its conformance suite, which takes a policy.
        at_sites: Whether it decides at sites, or what it leaves out is counted there.
        adapter: ``module:name`` of what installs the engine at its sites, from the same arguments; empty: the adapter
            that the option ``sites`` names.
        needs_linears: Whether a model without any linear is refused.
        by_worker: Whether the worker asks its policies, and ``attach`` does not get them.
        has_backward: Whether the step has a backward.
        shortens: Whether its forward computes less than all positions and examples.
        chooses_targets: Whether it chooses what the loss is computed of.
        weighs_examples: Whether it compares and weighs the losses of whole examples by itself.
        leaves_out_gradients: Whether trained parameters have no gradient at some steps, on which DDP would wait.
        may_repeat: Whether several of its policies may work in one model; its limits then say when.
        keeps_state: Whether its policies may be stateful.
        makes_trials: Whether they may want trial passes.
        fact: Name of a fact that is true of the policies that have an aspect; empty: this is a kind.
        facts: Returns what a policy declares with its options, for the rules, by name.
        limits: Rules of what does not go with it. Conditions are on its own policies; their kind is added, except to
            those of an aspect.
    """

    # Extensions of packages change a model behind all that are built in; the eager update, which frees gradients, comes
    # behind every extension that sees them. See decision 29.
    OF_PACKAGES: ClassVar[int] = 1_500
    EAGER_UPDATE: ClassVar[int] = 2_000

    policy: type[Any]
    asked: str = ""
    extensions: tuple[tuple[int, str], ...] = ()
    places: str = ""
    suite: str = ""
    at_sites: bool = False
    adapter: str = ""
    needs_linears: bool = False
    by_worker: bool = False
    has_backward: bool = True
    shortens: bool = False
    chooses_targets: bool = False
    weighs_examples: bool = False
    leaves_out_gradients: bool = False
    may_repeat: bool = False
    keeps_state: bool = True
    makes_trials: bool = False
    fact: str = ""
    facts: Callable[[Any], Mapping[str, object]] = _no_facts
    limits: tuple[Rule, ...] = ()

    @property
    def name(self) -> str:
        """The name of its class, by which rules refer to it."""
        return self.policy.__name__

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The limits with the condition that a policy is of this kind; those of an aspect as they are."""
        own: Conditions = NONE if self.fact else {"kind": (self.name,)}
        return tuple(replace(rule, policy={**own, **rule.policy}) for rule in self.limits)


def load(name: str) -> Any:
    """Import what a kind names.

    Args:
        name: Place of a function or class, ``module:name``.

    Returns:
        The function or class.
    """
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
