"""Supported combinations of policies and options: one table without torch, for recipes, ``attach``, trainer, worker and
docs."""

from sparsebp_cli.composition.backward import BackwardChoices, BackwardOptions
from sparsebp_cli.composition.optimizer import OptimizerEntry, find_optimizer, list_optimizers
from sparsebp_cli.composition.rule import Rule
from sparsebp_cli.composition.setup import PolicyFacts, Refusal, Setup, Spelling, find_refusals, refuse
from sparsebp_cli.composition.table import RULES

__all__ = [
    "RULES",
    "BackwardChoices",
    "BackwardOptions",
    "OptimizerEntry",
    "PolicyFacts",
    "Refusal",
    "Rule",
    "Setup",
    "Spelling",
    "find_optimizer",
    "find_refusals",
    "list_optimizers",
    "refuse",
]
