"""Decide which policies and options combine: one table without torch, for recipes, ``attach``, trainer, worker and
docs."""

from sparsebp_cli.policy.composition.adapter import ADAPTER_TYPES, READERS, find_adapter_options
from sparsebp_cli.policy.composition.backward import BackwardChoices, BackwardOptions
from sparsebp_cli.policy.composition.optimizer import OptimizerEntry, find_optimizer, list_optimizers
from sparsebp_cli.policy.composition.setup import PolicyFacts, Refusal, Setup, Spelling, find_refusals, refuse
from sparsebp_cli.policy.composition.table import find_rules, make_rules
from sparsebp_cli.policy.rule import Rule

__all__ = [
    "ADAPTER_TYPES",
    "READERS",
    "BackwardChoices",
    "BackwardOptions",
    "OptimizerEntry",
    "PolicyFacts",
    "Refusal",
    "Rule",
    "Setup",
    "Spelling",
    "find_adapter_options",
    "find_optimizer",
    "find_refusals",
    "find_rules",
    "list_optimizers",
    "make_rules",
    "refuse",
]
