"""Provide GaLore and Fira of the package pytorch-optimizer, with a state that can be saved.

Zhao, Zhang, Chen, Wang, Anandkumar, Tian: GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection, 2024,
https://arxiv.org/abs/2403.03507.

Xi Chen, Kaituo Feng, Changsheng Li, Xunhao Lai, Xiangyu Yue, Ye Yuan, Guoren Wang: Fira: Can We Achieve Full-rank
Training of LLMs Under Low-rank Constraint?, 2024, https://arxiv.org/abs/2410.01623. R is the gradient G in the subspace
P, and psi(R) is its step by Adam. A matrix moves by scale P psi(R) + s (G - scale P R). The second term is the part of
G outside of the subspace. Its factor s = |psi(R)| / |R| is Adam's scaling of the part inside, row by row or column by
column. The norm of the second term grows by at most 1 % a step.

The package keeps each projection in an object. Here its matrix is a tensor of the optimizer's state, so it is counted,
saved and loaded like the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytorch_optimizer
import torch
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sparsebp_cli.optimizers import evaluate


class Projected:
    """Run AdamW in the subspace of each matrix's largest singular vectors, and plain AdamW on all other parameters.

    A class lists it before an optimizer of the package among its bases.

    Args:
        params: Parameters or parameter groups, as for a class of torch.optim.
        lr: Learning rate, 0 or more.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled from the gradient, as in AdamW; 0 or more.
        rank: Number of singular vectors to keep.
        scale: Factor of the step in the subspace.
        update_proj_gap: Number of steps that use one subspace.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]

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
        below: Any = super()
        below.__init__(params, lr, betas, weight_decay, eps, foreach=False, **projection)
        optimizer: Any = self
        optimizer.register_state_dict_post_hook(_leave_out_objects)  # the package's objects are not saved

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, and return the closure's result."""
        loss = evaluate(closure)
        for state, group in self._matrices():
            if "projection" in state and "projector" not in state:  # a loaded state
                options = {key: group[key] for key in ("rank", "update_proj_gap", "scale", "projection_type")}
                state["projector"] = projector = GaLoreProjector(**options)
                projector.ortho_matrix, projector.last_svd_step = state["projection"], state["projection_step"]
        # The hooks around this class's step have run; the parent's step must not run them again.
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


class GaLore(Projected, pytorch_optimizer.GaLore):  # type: ignore[misc]
    """Leave out the rest of a matrix's gradient."""


class Fira(Projected, pytorch_optimizer.Fira):  # type: ignore[misc]
    """Scale the rest of a matrix's gradient like the part in the subspace."""
