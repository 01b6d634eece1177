"""The record in which a kind of policy declares its properties. The rest of the package reads only this record.

The module of each kind defines its record. A record refers to functions that import torch by name, so that recipes can
be checked without torch. ``attach``, the table of combinations, the conformance suites, the worker and the
documentation read the records. A package adds a kind by an entry point in the group ``sparsebp.kinds``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar, final

from sparsebp_cli.policy.rule import NONE, Conditions, Rule


def _no_facts(policy: Any) -> Mapping[str, object]:  # noqa: ARG001 - the signature of Kind.facts
    return {}


@final
@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of policy, or an aspect that policies of several kinds may have.

    Args:
        policy: The class that its policies derive from.
        asked: Text for the reference: when its policies decide, and when they are exact and unbiased.
        extensions: (number, ``module:name``) of each callable that takes the policy, the model and a ``Given``. It
            returns an extension of the engine that executes the policy, or None if it needs none. Extensions change the
            model in the order of the numbers. Empty: the engine or the worker calls the policies itself.
        places: ``module:name`` of a function of the same arguments that returns the places where a policy with state
            decides; empty: there are none.
        suite: ``module:name`` of its conformance suite, which takes a policy.
        at_sites: Whether it decides at sites, or its savings are counted there.
        adapter: ``module:name`` of the callable that installs the engine at its sites, from the same arguments; empty:
            the adapter that the option ``sites`` names.
        needs_linears: Whether a model without any linear is refused.
        shortens: Whether its forward computes less than all positions and examples.
        chooses_targets: Whether it chooses the targets of the loss.
        weighs_examples: Whether it weights the losses of whole examples itself.
        leaves_out_gradients: Whether trained parameters have no gradient at some steps, for which DDP would wait.
        may_repeat: Whether several of its policies may work in one model; its limits then say when.
        keeps_state: Whether its policies may be stateful.
        makes_trials: Whether its policies may request trial passes.
        fact: For an aspect, the name of the fact that is true of its policies; empty: this is a kind.
        facts: Function that returns a policy's facts by name, for the rules.
        limits: Rules of unsupported combinations. Their conditions refer to this kind's policies. ``rules`` adds the
            condition on the kind, except for an aspect.
    """

    # Extensions of packages change a model after all built-in ones. See decision 29.
    OF_PACKAGES: ClassVar[int] = 1_500

    policy: type[Any]
    asked: str = ""
    extensions: tuple[tuple[int, str], ...] = ()
    places: str = ""
    suite: str = ""
    at_sites: bool = False
    adapter: str = ""
    needs_linears: bool = False
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
        """The name of its policy class, which rules use."""
        return self.policy.__name__

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The limits, with the condition that a policy is of this kind. Limits of an aspect are unchanged."""
        own: Conditions = NONE if self.fact else {"kind": (self.name,)}
        return tuple(replace(rule, policy={**own, **rule.policy}) for rule in self.limits)


def load(name: str) -> Any:
    """Import a function or class that a kind names.

    Args:
        name: Its place, ``module:name``.

    Returns:
        The function or class.
    """
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
