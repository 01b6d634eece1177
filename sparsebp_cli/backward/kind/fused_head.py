"""Support for trl's fused head that several kinds share.

Trainers of trl replace the forward of the model that they train (``add_fused_lm_head``, trl 1.16). Called with
``fused_lm_head=True``, it runs the base model and returns log-probabilities of the labels, (B, T - 1), not logits. It
also accepts shifted labels, as under sequence parallelism. Extensions pass the labels of selected rows in this form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from torch import nn
from typing_extensions import override

from sparsebp_cli.backward.core.extension import EngineExtension, refuse_uncalled
from sparsebp_cli.backward.patch.forward import ForwardPatches
from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.policy import Policy

if TYPE_CHECKING:
    from sparsebp_cli.backward.core.policy_state import PolicyStates

ARGUMENT = "fused_lm_head"
IGNORED = -100  # the label of no target
LEFT = "a trl trainer leaves this head on the model: before your own loop, run `del model.forward`"

P = TypeVar("P", bound=Policy)


def has_fused_head(model: nn.Module) -> bool:
    """Return whether the forward of a model is trl's."""
    return ARGUMENT in (getattr(model.__dict__.get("forward"), "__kwdefaults__", None) or {})


class FusedHeadExtension(EngineExtension, Generic[P]):
    """The base class of extensions for selectors in a model with trl's fused head. Each installs its own forward.

    Args:
        policy: The selector.
        model: The module whose forward is trl's.
        states: The states of the engine's policies.
    """

    ARGUMENT: ClassVar[str] = ARGUMENT
    LEFT: ClassVar[str] = LEFT

    policy: P
    was_called: bool  # whether the forward has chosen

    def __init__(self, policy: P, model: nn.Module, states: PolicyStates) -> None:
        self.policy, self.model, self._states = policy, model, states
        self._patches, self.was_called = ForwardPatches(), False

    def remove(self) -> None:
        self._patches.remove()

    @override
    def check_called(self) -> None:
        if not self.was_called:
            if self.model.training:
                raise UnsupportedError(
                    f"{type(self.policy).__name__} was not called: no forward went through trl's fused head; {LEFT}"
                )
            refuse_uncalled(self.policy, self.model)
