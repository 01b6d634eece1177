"""Tests on two small parameters whether an optimizer updates each parameter independently of the others."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import torch
from torch import nn

from sparsebp_cli.backward.execution.eager.per_parameter_step import PerParameterStep
from sparsebp_cli.errors import UnsupportedError

_STEPS = 3  # a dependence on the total norm shows in the first step, one on running estimates later
_TOLERANCE = 1e-5  # foreach implementations may round differently


def refuse_inseparable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of a parameter depends on other parameters.

    The user's optimizer does not change. If it cannot be constructed from its own defaults, accept it without a test.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    known = inspect.signature(type(inner)).parameters.keys() - {"fused", "capturable"}  # may need an accelerator
    options = {name: value for name, value in inner.defaults.items() if name in known}
    # Pass no devices, since both parameters are on the host, and the default forks the generator of every GPU.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            together = _train(type(inner), options, one_by_one=False)
        except Exception:  # a third-party class may not accept its own defaults, or such parameters
            return
        apart = _train(type(inner), options, one_by_one=True)
    same = all(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in zip(together, apart, strict=True))
    if not same:
        raise UnsupportedError(
            f"update='eager' does not work with {type(inner).__name__}, whose update of a parameter depends on the "
            "other parameters; use update='deferred'"
        )


def _train(
    kind: Callable[..., torch.optim.Optimizer], options: dict[str, object], *, one_by_one: bool
) -> list[nn.Parameter]:
    torch.manual_seed(0)
    # Very unequal sizes, so that a norm over both is far from the norm of each.
    parameters = [nn.Parameter(torch.randn(4, 6)), nn.Parameter(100.0 * torch.randn(8, 4))]
    optimizer = kind(parameters, **options)
    single = PerParameterStep(optimizer)
    num_hooked: list[None] = []
    optimizer.register_step_post_hook(lambda *_: num_hooked.append(None))
    for step in range(_STEPS):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape) * 10.0 ** (step + number)
        if one_by_one:
            single.start()
            for parameter in parameters:
                single.update(parameter)
                parameter.grad = None
            single.write_back()
            if num_hooked:
                raise UnsupportedError(
                    f"update='eager' does not work with {type(optimizer).__name__}: its step() calls the step() of "
                    "its base class, whose step hooks would run once for each parameter; use update='deferred'"
                )
        else:
            optimizer.step()
    return parameters
