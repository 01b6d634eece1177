"""Whether an optimizer updates each parameter by itself: tried out on two small ones before anything starts."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import nn

from sparsebp_cli.backward.execution.eager.per_parameter_step import PerParameterStep
from sparsebp_cli.errors import UnsupportedError

_STEPS = 3  # what looks at the norm of all parameters shows at the first step; what estimates something, later
_TOLERANCE = 1e-5  # forms for many tensors at once may round differently


def refuse_inseparable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of a parameter depends on the others.

    An optimizer that cannot be made again from its own defaults is taken at its word.

    Args:
        optimizer: The user's; it is not touched.

    Raises:
        UnsupportedError: Two parameters updated one by one do not become what they become together.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    known = inspect.signature(type(inner)).parameters.keys() - {"fused", "capturable"}  # those are of devices
    options = {name: value for name, value in inner.defaults.items() if name in known}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            together = _train(type(inner), options, one_by_one=False)
        except Exception:  # not a class that is made from its defaults, or not for such parameters: anything may happen
            return
        apart = _train(type(inner), options, one_by_one=True)
    same = all(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in zip(together, apart, strict=True))
    if not same:
        raise UnsupportedError(
            f"update='eager' cannot drive {type(inner).__name__}: its update of a parameter depends on the other "
            "parameters; use update='deferred'"
        )


def _train(kind: Any, options: dict[str, Any], *, one_by_one: bool) -> list[nn.Parameter]:
    torch.manual_seed(0)
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
            single.settle()
            if num_hooked:
                raise UnsupportedError(
                    f"update='eager' cannot drive {kind.__name__}: its step calls that of the class below it, whose "
                    "hooks would run for every parameter; use update='deferred'"
                )
        else:
            optimizer.step()
    return parameters
