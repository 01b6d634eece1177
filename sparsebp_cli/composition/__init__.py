"""What goes with what: one table, without torch, read by recipes, ``attach``, the trainer, the worker and the docs."""

from sparsebp_cli.composition.backward import BackwardChoices, BackwardOptions
from sparsebp_cli.composition.optimizer import OptimizerEntry, find_optimizer, list_optimizers
from sparsebp_cli.composition.setup import PolicyFacts, Refusal, Setup, Spelling, find_refusals, refuse
from sparsebp_cli.composition.table import ROWS, Row

__all__ = [
    "ROWS",
    "BackwardChoices",
    "BackwardOptions",
    "OptimizerEntry",
    "PolicyFacts",
    "Refusal",
    "Row",
    "Setup",
    "Spelling",
    "find_optimizer",
    "find_refusals",
    "list_optimizers",
    "refuse",
]
