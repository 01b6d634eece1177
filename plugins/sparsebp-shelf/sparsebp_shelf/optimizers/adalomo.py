"""Provide AdaLomo of the package pytorch-optimizer with the interface of a PyTorch optimizer.

Lv, Yan, Guo, Lv, Qiu: AdaLomo: Low-memory Optimization with Adaptive Learning Rate, 2024,
https://arxiv.org/abs/2310.10195. The package's class needs the model and runs its own backward, in which every hook
loops over every parameter. This class applies its arithmetic to one parameter at a time; the caller decides when to
update.
"""

from __future__ import annotations

from typing import Any

from pytorch_optimizer import AdaLOMO
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from sparsebp_cli.optimizers import SeparateOptimizer

_STATE = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
_OPTIONS = ("weight_decay", "clip_threshold", "decay_rate", "eps1", "eps2")


class AdaLomo(SeparateOptimizer):
    """Take steps of bounded size relative to each parameter's own size, with a factored second moment.

    Args:
        params: Parameters or parameter groups, as for a class of torch.optim; vectors and matrices only.
        lr: Learning rate, in units of a parameter's root mean square.
        weight_decay: Decoupled from the gradient, as in AdamW; 0 or more.
        clip_threshold: Largest root mean square of a step before it is scaled.
        decay_rate: Exponent of the second moment's decay, below 0.
        eps1: Added to squared gradients.
        eps2: Lower limit of a parameter's root mean square.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        eps1: float = 1e-30,
        eps2: float = 1e-3,
    ) -> None:
        options = {
            "weight_decay": weight_decay,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "eps1": eps1,
            "eps2": eps2,
        }
        AdaLOMO(nn.Linear(1, 1), lr=lr, **options)  # validates the options
        super().__init__(params, {"lr": lr} | options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; raise ValueError for a complex parameter, or one with more than two dimensions."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() > 2:
                raise ValueError(
                    "AdaLomo supports only parameters with at most two dimensions, got the shape "
                    f"{tuple(parameter.shape)}"
                )

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, alone = self.state[parameter], nn.Module()
        shape = parameter.shape or (1,)  # a single number counts as a vector of one
        # It shares the memory, but has no hooks.
        alone.p = nn.Parameter(parameter.detach().view(shape))
        alone.p.grad = None if parameter.grad is None else parameter.grad.view(shape)
        options = {name: group[name] for name in _OPTIONS}
        package = AdaLOMO(alone, lr=group["lr"], loss_scale=0.0, **options)
        for name in _STATE:
            if name in state:
                getattr(package, name)["p"] = state[name]
        package.num_steps = state["step"] = state.get("step", 0) + 1
        package.grad_func(None)
        for name in _STATE:
            if "p" in getattr(package, name):
                state[name] = getattr(package, name)["p"]
