"""Mixed precision around the engine.

accelerate puts autocast around the forward of the model that it prepares, in the model's instance dictionary, and
leaves it there after the training. What the engine puts there belongs inside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from sparsebp_cli.backward import Engine


def attach_inside(
    model: nn.Module, accelerator: Accelerator, attach: Callable[[], Engine]
) -> tuple[Engine, Callable[[], None]]:
    """Attach an engine inside of what accelerate has put around a model's forward, if it has.

    Args:
        model: As accelerate prepared it, without wrappers.
        accelerator: That prepared it.
        attach: Attaches.

    Returns:
        The engine, and what detaches it and gives the model back as it was.
    """
    place = model.__dict__
    prepared = place.pop("forward", None) if "_original_forward" in place else None
    try:
        engine = attach()
    except BaseException:
        if prepared is not None:
            place["forward"] = prepared
        raise
    if prepared is None:
        return engine, engine.detach
    own = place.get("forward")
    place["forward"] = prepared if own is None else _in_precision(own, model, accelerator)

    def detach() -> None:
        if own is not None:
            place["forward"] = own
        engine.detach()
        place["forward"] = prepared

    return engine, detach


def _in_precision(forward: Callable[..., Any], model: nn.Module, accelerator: Accelerator) -> Any:
    """Return a forward as ``Accelerator.prepare_model`` would have made it."""

    def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return forward(*args, **kwargs)

    return MethodType(convert_outputs_to_fp32(run), model)
