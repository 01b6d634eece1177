"""APOLLO and APOLLO-Mini: the whole gradient, scaled as AdamW would scale a few random projections of it.

Zhu, Zhang, Cong, Liu, Park, Chandra, Long, Pan, Wang, Lee: APOLLO: SGD-like Memory, AdamW-level Performance, 2025,
https://arxiv.org/abs/2412.05270, algorithm 1. We differ: each step draws the projection of a matrix again from its own
seed and does not store it. So it depends neither on the order of updates nor on other random draws. (pytorch-optimizer
4.1 scales the projected gradient instead of the whole one, so its steps have the projection's rank.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sparsebp_cli.optimizers.separate import SeparateOptimizer, adam_step, check_betas, check_not_negative, wide_dtype
from sparsebp_cli.policy import Step

_GROWTH = 1.01  # section 3.2: largest ratio of the norms of two consecutive steps


@dataclass(frozen=True)
class _Projection:
    """The name from which :meth:`Step.generator` draws a projection."""

    name: str


class Apollo(SeparateOptimizer):
    """AdamW for vectors; for matrices, gradients scaled by channel or as a whole.

    Args:
        params: Parameters or parameter groups, as for torch.optim.
        lr: Learning rate, 0 or more.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Weight decay, decoupled from the gradient as in AdamW; 0 or more.
        rank: Number of projections of a matrix, 1 or more.
        scale: The square of the factor of matrices' steps, 0 or more.
        scale_type: ``channel``: one factor for each row or column, whichever are more. ``tensor``: one factor for all.
        update_proj_gap: Number of steps that use the same projection, 1 or more.
        seed: Seed of the random projections.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(  # noqa: PLR0913 - the paper's
        self,
        params: ParamsT,
        lr: float = 1e-2,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        rank: int = 128,
        scale: float = 1.0,
        scale_type: str = "channel",
        update_proj_gap: int = 200,
        seed: int = 0,
    ) -> None:
        if scale_type not in ("channel", "tensor"):
            raise ValueError(f"scale_type must be channel or tensor, got {scale_type!r}")
        for name, value in {"rank": rank, "update_proj_gap": update_proj_gap}.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of 1 or more, got {value!r}")
        check_betas(betas)
        check_not_negative({"lr": lr, "eps": eps, "weight_decay": weight_decay, "scale": scale})
        self._number: dict[Tensor, int] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rank": rank,
            "scale": scale,
            "scale_type": scale_type,
            "update_proj_gap": update_proj_gap,
            "seed": seed,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters."""
        super().add_param_group(param_group)
        self._enumerate()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied optimizer, of which PyTorch copies only groups and state."""
        super().__setstate__(state)
        self._enumerate()

    def _enumerate(self) -> None:
        """Give each parameter its place among all as a number, which determines its projections."""
        parameters = (p for group in self.param_groups for p in group["params"])
        self._number = {parameter: number for number, parameter in enumerate(parameters)}

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None  # step() skips parameters without gradient
        state["step"] = state.get("step", 0) + 1
        if gradient.dim() != 2:
            update = adam_step(gradient.to(wide_dtype(gradient)), state, group)
        else:
            update = self._scale(parameter, gradient, state, group)
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])

    def _scale(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return the scaled gradient by equations 5 to 7, with factors from the projected gradient."""
        small = 0 if gradient.shape[0] <= gradient.shape[1] else 1
        projection_RS = self._draw(parameter, gradient.shape[small], state["step"], group).to(gradient.dtype)
        projected = projection_RS @ (gradient if small == 0 else gradient.t())  # rank by channels
        moved = adam_step(projected.to(wide_dtype(projected)), state, group)
        dim = 0 if group["scale_type"] == "channel" else None
        factor = _norm(moved, dim) / (_norm(projected, dim) + 1e-8)
        if dim == 0:
            factor = factor[None, :] if small == 0 else factor[:, None]
        update = gradient * factor.to(gradient.dtype)
        norm = _norm(update, None)
        if "norm" in state:
            limit = torch.clamp(norm / (state["norm"] + 1e-8), min=_GROWTH) / _GROWTH
            update, norm = update.div_(limit.to(update.dtype)), norm / limit
        state["norm"] = norm
        return update.mul_(math.sqrt(group["scale"]))

    def _draw(self, parameter: Tensor, width: int, step: int, group: dict[str, Any]) -> Tensor:
        if parameter not in self._number:  # a policy that trains a part of a weight has put the part in its place
            self._enumerate()
        turn = (step - 1) // group["update_proj_gap"]
        place = _Projection(f"APOLLO's projection of parameter {self._number[parameter]}")
        generator = Step(turn, seed=group["seed"]).generator(place, parameter.device)
        shape = group["rank"], width
        return torch.randn(shape, generator=generator, device=parameter.device) / math.sqrt(group["rank"])


def _norm(tensor: Tensor, dim: int | None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=dim, dtype=wide_dtype(tensor))
    return norm
