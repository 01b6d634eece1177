"""The arguments from which every extension is made: a policy, the model, and a record of the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.policy import Site, Step

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparsebp_cli.backward.core.extension import EngineExtension


@dataclass(frozen=True)
class Given:
    """Arguments and findings of ``attach`` for all extensions of an engine.

    Args:
        states: States of the policies that are :class:`~sparsebp_cli.policy.Stateful`.
        optimizer: The model's optimizer; None: without one, every backward is a step.
        first: The step at which the engine begins, with the run's seed and its number of steps.
        num_layers: Number of the model's layers; 0 if unknown.
        linears: The sites of an engine at linears, with an empty ``batch_shape``.
        reference: The model with which a policy compares; a string: each batch contains the reference's losses.
        exclude: Globs over names of modules that policies ignore.
        packs: Whether a policy packs batches. It then also executes the choices of other policies.
    """

    states: PolicyStates = field(default_factory=PolicyStates)
    optimizer: torch.optim.Optimizer | None = None
    first: Step = field(default_factory=lambda: Step(0))
    num_layers: int = 0
    linears: Sequence[Site] = ()
    reference: nn.Module | str | None = None
    exclude: Sequence[str] = ()
    packs: bool = False

    @property
    def trained_by(self) -> torch.optim.Optimizer:
        """The optimizer. Use this in policies that ``attach`` refuses without one."""
        assert self.optimizer is not None
        return self.optimizer


# Makes the extension that executes a policy; None if its options need none. ``attach`` calls it before any change.
MakeExtension: TypeAlias = "Callable[[Any, nn.Module, Given], EngineExtension | None]"
# Returns the places where a policy with state decides.
FindPlaces: TypeAlias = "Callable[[Any, nn.Module, Given], Sequence[object]]"
