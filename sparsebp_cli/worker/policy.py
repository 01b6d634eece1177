"""Make a recipe's policies, and attach them to the model and to the order of batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sparsebp_cli.backward import Engine, attach
from sparsebp_cli.backward.core.loss_weight import LOSS_WEIGHT
from sparsebp_cli.policy import Policy, ReferenceReader, make_policy
from sparsebp_cli.policy.known_kind import find_columns, find_facts
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.reference import Reference


def make_policies(recipe: Recipe) -> list[Policy]:
    """Return the policies of a recipe."""
    return [make_policy(entry.name, **entry.options) for entry in recipe.policy]


def attach_policies(
    policies: Sequence[Policy], recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, reference: Reference
) -> Engine:
    """Attach policies to a model without wrappers, with the recipe's backward options."""
    is_eager, is_full = recipe.backward.update == "eager", recipe.backward.checkpointing == "full"
    # Full checkpointing is transformers' own; building the model has already enabled it.
    return attach(
        model,
        policies,
        optimizer=optimizer,
        max_grad_norm=recipe.training.max_grad_norm if is_eager else None,
        seed=recipe.training.seed,
        num_steps=recipe.training.max_steps,
        reference=reference.attached if any(map(compares, policies)) else None,
        **recipe.backward.choices(**({"checkpointing": "none"} if is_full else {})),
    )


def set_columns(order: BatchOrder, policies: Sequence[Policy], recipe: Recipe, reference: Reference) -> BatchOrder:
    """Set the columns that batches include: loss weights, and those that policies read. Return the same order."""
    facts = [find_facts(policy) for policy in policies]
    weighs = any(LOSS_WEIGHT in example.columns for example in reference.data.train)
    order.columns = find_columns(policies) | (reference.columns if any(map(compares, policies)) else frozenset())
    order.columns |= frozenset({LOSS_WEIGHT}) if weighs else frozenset()
    columns = [column for found in facts if isinstance(column := found.get("candidate_column"), str)]
    order.candidates = next(iter(columns), None)
    shares = any(found.get("shares_updates") for found in facts)
    order.sort_steps(recipe.training.gradient_accumulation_steps if shares else 1)
    return order


def compares(policy: Policy) -> bool:
    """Return whether a policy compares with a reference model."""
    return isinstance(policy, ReferenceReader) and policy.reads_reference
