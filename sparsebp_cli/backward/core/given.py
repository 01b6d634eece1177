"""What every extension is made from: a policy, the model, and what ``attach`` was given beside both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from sparsebp_cli.backward.core.policy_state import PolicyStates
from sparsebp_cli.policy import Site, Step

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sparsebp_cli.backward.core.extension import EngineExtension


@dataclass(frozen=True)
class Given:
    """What ``attach`` was given and has found, for all extensions of an engine.

    Args:
        states: State and numbers of the policies that are :class:`~sparsebp_cli.policy.Stateful`.
        optimizer: The model's optimizer; None: there is none, and every backward is a step.
        first: The step at which the engine begins, with the run's seed and its number of steps.
        num_layers: Number of the model's layers; 0 where they are not known.
        linears: The sites at which an engine of linears is installed, with an empty ``batch_shape``.
        num_examples: Rows of the training data; None if they are not known.
        reference: The model that a policy compares with; any text: each batch brings the reference's losses.
        validation: Examples that are never trained on, a batch of the model's arguments; None: there are none.
        exclude: Globs over names of modules that no policy decides about.
        packs: Whether a policy leaves out rows of whole batches, which then carries out what others choose.
        folder: The training's own folder, in which policies keep what can be computed again; None: there is none.
    """

    states: PolicyStates = field(default_factory=PolicyStates)
    optimizer: torch.optim.Optimizer | None = None
    first: Step = field(default_factory=lambda: Step(0))
    num_layers: int = 0
    linears: Sequence[Site] = ()
    num_examples: int | None = None
    reference: nn.Module | str | None = None
    validation: Mapping[str, Tensor] | None = None
    exclude: Sequence[str] = ()
    packs: bool = False
    folder: Path | None = None

    @property
    def trained_by(self) -> torch.optim.Optimizer:
        """The optimizer, of policies that are refused without one."""
        assert self.optimizer is not None
        return self.optimizer


# Makes the extension that carries a policy out; None where its options need none. It is called before anything changes.
MakeExtension: TypeAlias = "Callable[[Any, nn.Module, Given], EngineExtension | None]"
# Returns where a policy with state decides.
FindPlaces: TypeAlias = "Callable[[Any, nn.Module, Given], Sequence[object]]"
