"""Attach policies to the model phase by phase, in the same way at the start of a run, a resume and a phase boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sparsebp_cli.backward import Engine, attach
from sparsebp_cli.backward.core.engine import OF_POLICIES
from sparsebp_cli.backward.core.loss_weight import LOSS_WEIGHT
from sparsebp_cli.policy import Policy, ReferenceReader, make_policy
from sparsebp_cli.policy.known_kind import find_columns, find_facts, list_kinds
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run.policy_phase import PolicyPhase, describe_phases, find_phase
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.reference import Reference


def make_phases(recipe: Recipe) -> list[PolicyPhase[Policy]]:
    """Return the phases of a recipe with their policies made."""
    return [
        PolicyPhase([make_policy(entry.name, **entry.options) for entry in p.policies], p.until, p.first, p.end, p.key)
        for p in recipe.phases
    ]


@dataclass(frozen=True)
class PhaseSequence:
    """The phases of a run, and what their policies are attached to."""

    phases: Sequence[PolicyPhase[Policy]]
    recipe: Recipe
    model: nn.Module  # without wrappers
    optimizer: torch.optim.Optimizer
    reference: Reference

    def at(self, step: int) -> PolicyPhase[Policy]:
        """Return the phase of an optimizer step, counted from 0. For later steps, return the last step's phase."""
        return self.phases[find_phase(self.phases, step)]

    def attach(self, phase: PolicyPhase[Policy]) -> Engine:
        """Attach the policies of a phase, with the recipe's backward options."""
        recipe = self.recipe
        is_eager, is_full = recipe.backward.update == "eager", recipe.backward.checkpointing == "full"
        # Full checkpointing is transformers' own; building the model has already enabled it.
        return attach(
            self.model,
            [policy for policy in phase.policies if not _is_asked_by_worker(policy)],  # the data order calls the others
            optimizer=self.optimizer,
            max_grad_norm=recipe.training.max_grad_norm if is_eager else None,
            seed=recipe.training.seed,
            num_steps=recipe.training.max_steps,
            reference=self.reference.attached if any(map(compares, phase.policies)) else None,
            **recipe.backward.choices(**({"checkpointing": "none"} if is_full else {})),
        )

    def replace(self, engine: Engine, phase: PolicyPhase[Policy]) -> Engine:
        """Detach the previous policies and attach those of a phase, between two optimizer steps. Policy states start
        anew; other state continues."""
        before: dict[str, Any] = engine.state_dict() | {"index": phase.first}
        engine.detach()
        following = self.attach(phase)
        state = following.state_dict()
        following.load_state_dict(state | {name: before[name] for name in state if name not in OF_POLICIES})
        return following

    def set_columns(self, order: BatchOrder, phase: PolicyPhase[Policy]) -> BatchOrder:
        """Set the columns that batches include: those that the phase's policies read, and the loss weights. Return the
        same order."""
        reference = self.reference.columns if any(map(compares, phase.policies)) else frozenset()
        facts = [find_facts(policy) for policy in phase.policies]
        weighs = any(LOSS_WEIGHT in example.columns for example in self.reference.data.train)
        order.columns = find_columns(phase.policies) | reference
        order.columns |= frozenset({LOSS_WEIGHT}) if weighs else frozenset()
        columns = [column for found in facts if isinstance(column := found.get("candidate_column"), str)]
        order.candidates = next(iter(columns), None)
        shares = any(found.get("shares_updates") for found in facts)
        order.sort_steps(self.recipe.training.gradient_accumulation_steps if shares else 1)
        return order

    def describe(self, phase: PolicyPhase[Policy]) -> str:
        """Return one line about a phase that begins."""
        number = self.phases.index(phase)
        names = describe_phases([self.recipe.phases[number]], lambda entry: entry.name)
        return f"phase {number + 1} of {len(self.phases)} begins after step {phase.first}: {names}"


def compares(policy: Policy) -> bool:
    """Return whether a policy compares with a reference model."""
    return isinstance(policy, ReferenceReader) and policy.reads_reference


def _is_asked_by_worker(policy: Policy) -> bool:
    return any(kind.by_worker for kind in list_kinds([policy]))
