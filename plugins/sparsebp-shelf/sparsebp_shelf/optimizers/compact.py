"""Provide CompAct's AdamW: its moments are those of gradients in the projection that an input saver has drawn.

Yara Shamshoum, Nitzan Hodos, Yuval Sieradzki, Assaf Schuster: CompAct: Compressed Activations for Memory-Efficient LLM
Training, 2025, https://arxiv.org/abs/2410.15352, after its abstract and formulas. P is the matrix that projected the
input x of a linear, and the projected gradient is ``dy^T x P``. Adam keeps moments of it, and the weight moves by
Adam's step times P^T. We differ: we recover the small gradient from the whole one, ``dy^T x P P^T``. The moments stay
when P is drawn again, as we understand the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.optimizers import SeparateOptimizer, adam_step, check_betas, check_not_negative, wide_dtype
from sparsebp_shelf.saver import SavedProjection

Find = Callable[[Tensor], tuple[SavedProjection, int] | None]


class CompActAdamW(SeparateOptimizer):
    """Run AdamW: in the projection for weights whose input was projected, on the whole gradient for all others.

    Args:
        params: Parameters or parameter groups, as for a class of torch.optim.
        lr: Learning rate, 0 or more.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled from the gradient, as in AdamW; 0 or more.

    Raises:
        ValueError: An argument is out of range.
    """

    _find: Find | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        check_betas(betas)
        check_not_negative({"lr": lr, "eps": eps, "weight_decay": weight_decay})
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def read_projections(self, find: Find) -> None:
        """Store ``find``, which returns how an input was projected; ``attach(optimizer=...)`` calls this."""
        self._find = find

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if self._find is None:
            raise UnsupportedError(
                "the optimizer compact needs the projection that the policy draws: pass the optimizer to "
                "attach(optimizer=...)"
            )
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None  # step() skips parameters without a gradient
        gradient = gradient.to(wide_dtype(gradient))
        state["step"] = state.get("step", 0) + 1
        found = self._find(parameter)
        if found is None:
            update = adam_step(gradient, state, group)
        else:
            projection, input_dim = found
            matrix_DK = projection.draw().to(gradient.dtype)
            small_OK = shrink(gradient if input_dim == 1 else gradient.t(), matrix_DK)
            if "exp_avg" in state and state["exp_avg"].shape != small_OK.shape:
                raise UnsupportedError(
                    f"the optimizer compact has moments of shape {tuple(state['exp_avg'].shape)}, but the "
                    f"projected gradient has the shape {tuple(small_OK.shape)}: the policy's keep must not change"
                )
            update = adam_step(small_OK, state, group) @ matrix_DK.t()
            update = update if input_dim == 1 else update.t()
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])


def shrink(gradient_OD: Tensor, matrix_DK: Tensor) -> Tensor:
    """Return the small gradient S of a whole gradient ``S P^T``: ``S P^T P (P^T P)^-1``."""
    gram_KK = matrix_DK.t() @ matrix_DK
    solved_KO: Tensor = torch.linalg.solve_ex(gram_KK, (gradient_OD @ matrix_DK).t())[0]  # does not wait for a GPU
    return solved_KO.t()
