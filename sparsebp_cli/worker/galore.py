"""GaLore of the package pytorch-optimizer, with a state that can be saved.

Zhao, Zhang, Chen, Wang, Anandkumar, Tian: GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection, 2024,
https://arxiv.org/abs/2403.03507. The package keeps each projection in an object; here its matrix is a tensor of the
optimizer's state, so that it is counted, saved and loaded like the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytorch_optimizer
import torch
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sparsebp_cli.worker.separate import evaluate


class GaLore(pytorch_optimizer.GaLore):  # type: ignore[misc]
    """AdamW in the subspace of each matrix's largest singular vectors; AdamW for all that is no matrix.

    Args:
        params: As for any optimizer.
        lr: Learning rate.
        betas: Of the moments.
        eps: Added to the root of the second moment.
        weight_decay: As in AdamW.
        rank: Singular vectors that are kept.
        scale: Factor of matrices' steps.
        update_proj_gap: Steps for which a subspace is used.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        rank: int = 128,
        scale: float = 0.25,
        update_proj_gap: int = 200,
    ) -> None:
        # One tensor at a time: with several, the package computes the same in another form.
        projection = {"rank": rank, "scale": scale, "update_proj_gap": update_proj_gap, "projection_type": "std"}
        super().__init__(params, lr, betas, weight_decay, eps, foreach=False, **projection)
        self.register_state_dict_post_hook(_leave_out_objects)

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
        pytorch_optimizer.GaLore.step.__wrapped__(self)
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
