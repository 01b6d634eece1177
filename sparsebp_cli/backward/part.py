"""What carries out the policies that are not asked at sites: before a step, or in the forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, Protocol, runtime_checkable

from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sparsebp_cli.backward.engine import Engine
    from sparsebp_cli.backward.flops import FlopCount
    from sparsebp_cli.backward.trace import ModuleTrace
    from sparsebp_cli.policy import Policy, Step


class Part(Protocol):
    """One policy at work in one model, beside the binding of its sites."""

    def install(self, engine: Engine) -> None:
        """Change the model; ``engine.now()`` tells the step, ``engine.enabled`` whether the policy is in force."""

    def remove(self) -> None:
        """Give the model back as it was."""

    def enable(self, enabled: bool) -> None:
        """Be in force, or leave the model as it would be without the policy."""

    def start_step(self, step: Step) -> None:
        """Prepare for an optimizer step: called when attached, after each step of the optimizer, and on resume."""


@runtime_checkable
class Reading(Protocol):
    """A part whose policy reads columns of the batch."""

    def give(self, **columns: Tensor) -> None:
        """Be given columns that the model's forward will not get; they count until the next call."""


@runtime_checkable
class Asking(Protocol):
    """A part whose policy is asked in the model's forward."""

    def check_asked(self) -> None:
        """Refuse a backward when the policy has not been asked since the model was attached."""


@dataclass(frozen=True)
class DensePass:
    """A forward and backward pass of the model without policies, under counters.

    Args:
        loss: That was differentiated; its graph is there, what it saved is not.
        trace: Knows which module made a node of the graph.
        flops: What was executed, by module.
    """

    loss: Tensor
    trace: ModuleTrace
    flops: FlopCount


@dataclass(frozen=True)
class PassClaim:
    """Which share of a dense pass's FLOPs a policy claims to leave, by module; a module that is not named keeps all.

    Shares of several policies are multiplied.

    Args:
        backward: Of the backward, in [0, 1].
        recomputed: Of forwards that run again inside the backward, in [0, 1].
        forward: Of the forward, from 0.
        allowed_backward: As ``backward``, with counts rounded up to what can be computed; empty: the same.
        allowed_recomputed: As ``recomputed``, the same way.
    """

    backward: Mapping[str, float] = field(default_factory=dict)
    recomputed: Mapping[str, float] = field(default_factory=dict)
    forward: Mapping[str, float] = field(default_factory=dict)
    allowed_backward: Mapping[str, float] = field(default_factory=dict)
    allowed_recomputed: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Claiming(Protocol):
    """A part whose policy claims to leave work of the backward undone; others claim nothing."""

    def claim(self, dense: DensePass) -> PassClaim:
        """Return what the policy, in force as at the step under way, leaves of a dense pass on the same batch."""


def refuse_unasked(policy: Policy, model: nn.Module) -> NoReturn:
    """Refuse a backward of a model whose forward nobody has heard of.

    Args:
        policy: That would have been asked in it.
        model: Whose forward it is.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        f"{type(policy).__name__} was never asked: a backward came, and before it no forward of {type(model).__name__} "
        "in training with gradients; a script that calls parts of the model by themselves, or something that kept the "
        "forward from before the model was attached, goes past the policy"
    )
