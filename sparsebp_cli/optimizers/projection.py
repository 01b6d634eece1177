"""The state of projections in optimizers of the package pytorch-optimizer, so that it can be saved.

The package keeps each projection in an object; here its matrix is a tensor of the optimizer's state, so that it is
counted, saved and loaded like the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector
from torch import Tensor

from sparsebp_cli.optimizers.separate import evaluate


class SavedProjections:
    """Comes before an optimizer of the package among the bases of a class; its ``__init__`` calls
    :meth:`save_projections` at the end."""

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]

    def save_projections(self) -> None:
        """Leave the package's objects out of what is saved."""
        optimizer: Any = self
        optimizer.register_state_dict_post_hook(_leave_out_objects)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, and return the closure's result."""
        loss = evaluate(closure)
        for state, group in self._matrices():
            if "projection" in state and "projector" not in state:  # it was loaded
                options = {key: group[key] for key in ("rank", "update_proj_gap", "scale", "projection_type")}
                state["projector"] = projector = GaLoreProjector(**options)
                projector.ortho_matrix, projector.last_svd_step = state["projection"], state["projection_step"]
        # The hooks around this class's step have run: not those of the class below once more.
        below: Any = super()
        below.step.__wrapped__(self)
        for state, _ in self._matrices():
            projector = state["projector"]
            state["projection"], state["projection_step"] = projector.ortho_matrix, projector.last_svd_step
        return loss

    def _matrices(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dim() == 2:
                    yield self.state[parameter], group


def _leave_out_objects(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        number: {name: value for name, value in values.items() if isinstance(value, Tensor | int | float)}
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
