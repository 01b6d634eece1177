"""What carries out the policies that are not asked at sites: before a step, or in the forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol, runtime_checkable

from sparsebp_cli.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sparsebp_cli.backward.core.engine import Engine
    from sparsebp_cli.policy import Policy, Step
from sparsebp_cli.backward.observe.claim import DensePass, PassClaim


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
