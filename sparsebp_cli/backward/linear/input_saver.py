"""The base class of extensions that decide in the forward which form of a linear's input is saved for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from sparsebp_cli.backward.core.extension import EngineExtension
from sparsebp_cli.backward.core.scope import Scope
from sparsebp_cli.policy import Policy, Saved, Site


@final
@dataclass(frozen=True)
class SavedInput:
    """The saved form of one input.

    Args:
        saved: The form that replaces the input; None: the input itself.
        share: Estimated multiplications of the weight's gradient, as a fraction of the dense ones.
        first: Name of the linear that reads the input first.
    """

    saved: Saved | None
    share: float = 1.0
    first: str = ""


class SavesInputs(EngineExtension):
    """An extension that decides which form of linears' inputs is saved. Their adapter calls it in each forward."""

    policy: Policy
    scope: Scope  # the linears at which it decides

    def save(self, site: Site, x: Tensor, weight: Tensor, input_dim: int) -> SavedInput:
        """Return the saved form of a linear's input. The adapter calls this in forwards with gradients enabled.

        Args:
            site: The linear.
            x: Its input.
            weight: Its weight.
            input_dim: The dimension of the weight that belongs to inputs.

        Returns:
            The saved form.
        """
        raise NotImplementedError
