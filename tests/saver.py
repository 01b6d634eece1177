"""What is saved of inputs, by hand: plain autograd with another input for the gradient of each weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from sparsebp_cli.policy import Site, Step
from sparsebp_shelf.saver import InputSaver


@contextmanager
def saving_by_hand(
    model: nn.Module, policy: InputSaver, step: Step, means: dict[str, Tensor] | None = None
) -> Iterator[list[str]]:
    """Let each linear with a trained weight compute its weight's gradient with the input that a policy restores.

    The output is that of the whole input, and the sum of two terms: one has the gradient of the input, the other, of
    value zero, that of the weight. One input is asked for once.

    Args:
        model: A model without an engine.
        policy: Restores the inputs.
        step: The step of the forward, in which every linear runs once.
        means: Gets the mean row of each input.

    Yields:
        The names of the linears that were asked.
    """
    asked: list[str] = []
    known: dict[int, tuple[Tensor, Tensor]] = {}  # by id, which the input itself keeps from being given again

    def restore(x: Tensor, site: Site) -> Tensor:
        if id(x) not in known:
            asked.append(site.name)
            is_cast = torch.is_autocast_enabled("cpu") and x.dtype == torch.float32
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                cast = x.detach().to(torch.bfloat16 if is_cast else x.dtype)
                saved = policy.at(step).save(cast.reshape(-1, x.shape[-1]), site, step)
                if means is not None:
                    means[site.name] = (
                        cast.reshape(-1, x.shape[-1]).to(torch.promote_types(cast.dtype, torch.float32)).mean(0)
                    )
                known[id(x)] = x, (cast if saved is None else saved.restore().view(x.shape))
        return known[id(x)][1]

    def install(name: str, module: nn.Module) -> None:
        def forward(x: Tensor) -> Tensor:
            weight, bias = module.weight, module.bias
            assert isinstance(weight, Tensor)
            turned = weight.t() if isinstance(module, Conv1D) else weight
            if not (weight.requires_grad and torch.is_grad_enabled()):
                return linear(x, turned, bias)  # type: ignore[arg-type]
            restored = restore(x, Site(name, len(turned), tuple(x.shape[:-1])))
            other = linear(restored, turned)
            return linear(x, turned.detach(), bias) + (other - other.detach())  # type: ignore[arg-type]

        module.forward = forward

    names = {module: name for name, module in reversed(list(model.named_modules()))}
    modules = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    if policy.where is not None:
        modules = [module for module in modules if any(fnmatchcase(names[module], glob) for glob in policy.where)]
    for module in modules:
        install(names[module], module)
    try:
        yield asked
    finally:
        for module in modules:
            del module.forward
