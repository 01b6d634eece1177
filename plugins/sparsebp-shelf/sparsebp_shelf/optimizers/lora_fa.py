"""Provide LoRA-FA: AdamW on the second factors of low-rank adapters, with projected gradients of the whole weight.

Longteng Zhang, Lin Zhang, Shaohuai Shi, Xiaowen Chu, Bo Li: LoRA-FA: Memory-efficient Low-rank Adaptation for Large
Language Models Fine-tuning, 2023, https://arxiv.org/abs/2308.03303. An adapter adds ``s B A`` to a weight. With A as
drawn, the gradient g of B becomes ``1/s^2 g (A A^T + 1e-8 I)^-1``. A plain gradient step along it changes the weight by
its negative gradient, projected on the rows of A. We differ: a policy freezes A, not the optimizer. Each step inverts
the Gram matrix in double precision, so nothing is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_cli.errors import UnsupportedError
from sparsebp_cli.optimizers import SeparateOptimizer, adam_step, check_betas, check_not_negative, wide_dtype

_RIDGE = 1e-8  # added to the Gram matrix's diagonal


class LoRAFA(SeparateOptimizer):
    """Run AdamW: on projected gradients for second factors of adapters, on plain gradients for all other parameters.

    Args:
        model: A model with peft's low-rank adapters on linears. Their first factors must be frozen before the first
            step.
        lr: Learning rate, 0 or more.
        betas: Decay rates of the first and the second moment, in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled from the gradient, as in AdamW; 0 or more.

    Raises:
        ValueError: An argument is out of range.
        UnsupportedError: The model has no adapters, or adapters other than low-rank ones on linears.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        check_betas(betas)
        check_not_negative({"lr": lr, "eps": eps, "weight_decay": weight_decay})
        self._adapters = find_adapters(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        super().__init__(trained, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: PyTorch's, and which factors belong together."""
        return {**super().__getstate__(), "_adapters": self._adapters}

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None  # step() skips parameters without a gradient
        gradient = gradient.to(wide_dtype(gradient))
        if parameter in self._adapters:
            first_RD, scale = self._adapters[parameter]
            if first_RD.requires_grad:
                raise UnsupportedError(
                    "lora-fa needs adapters whose lora_A is frozen, but at least one is trained: freeze all "
                    "parameters that match *lora_A*"
                )
            gradient = project(gradient, first_RD, scale)
        state["step"] = state.get("step", 0) + 1
        update = adam_step(gradient, state, group)
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])


def project(gradient_OR: Tensor, first_RD: Tensor, scale: float) -> Tensor:
    """Return a second factor's gradient times the first factor's inverse Gram matrix, divided by ``scale`` squared."""
    wide_RD = first_RD.double()
    gram_RR = wide_RD @ wide_RD.t() + _RIDGE * torch.eye(len(wide_RD), dtype=torch.float64, device=wide_RD.device)
    solved_RO: Tensor = torch.linalg.solve_ex(gram_RR, gradient_OR.double().t())[0]  # does not wait for a GPU
    return (solved_RO.t() / scale**2).to(gradient_OR.dtype)


def find_adapters(model: nn.Module) -> dict[Tensor, tuple[Tensor, float]]:
    """Return each second factor of a model's adapters with its first factor and the adapter's scale."""
    from peft.tuners.lora import LoraLayer

    found: dict[Tensor, tuple[Tensor, float]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        factors = [*module.lora_A.values(), *module.lora_B.values()]
        if not all(isinstance(factor, nn.Linear) for factor in factors) or len(module.lora_embedding_A):
            raise UnsupportedError(
                f"lora-fa supports only adapters of linear layers, but {name!r} is an adapter of another layer"
            )
        if len(module.lora_magnitude_vector):
            raise UnsupportedError(f"lora-fa does not support DoRA (at {name!r}): set use_dora=False")
        for key, second in module.lora_B.items():
            found[second.weight] = module.lora_A[key].weight, float(module.scaling[key])
    if not found:
        raise UnsupportedError(
            "lora-fa trains LoRA adapters, but the model has none: set model.lora in the recipe, or add "
            "adapters with peft"
        )
    return found
