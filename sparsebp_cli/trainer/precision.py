"""Mixed precision around the engine.

accelerate wraps the forward of the model that it prepares with autocast, as an attribute of the instance, and leaves
the wrapper there after training. The engine's own override must be inside that wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from sparsebp_cli.backward import Engine


def attach_inside(
    model: nn.Module, accelerator: Accelerator, attach: Callable[[], Engine], *, beside: nn.Module | None = None
) -> tuple[Engine, Callable[[], None]]:
    """Attach an engine inside accelerate's wrapper of the model's forward, if there is one. ``beside`` is another model
    whose forward the engine overrides in the same way. Return the engine and a function that detaches it and restores
    the models."""
    if beside is not None:
        inner: list[Callable[[], None]] = []

        def attach_both() -> Engine:
            engine, undo = attach_inside(beside, accelerator, attach)
            inner.append(undo)
            return engine

        engine, undo = attach_inside(model, accelerator, attach_both)

        def detach_both() -> None:
            undo()
            inner[0]()

        return engine, detach_both
    place = model.__dict__
    prepared = place.pop("forward", None) if "_original_forward" in place else None
    replaced = None  # another library's forward before accelerate wrapped it
    if prepared is not None:
        before = place["_original_forward"]
        if getattr(before, "__func__", before) is not type(model).forward:
            replaced = place["forward"] = before
    try:
        engine = attach()
    except BaseException:
        if prepared is not None:
            place["forward"] = prepared
        raise
    if prepared is None:
        return engine, engine.detach
    own = place.get("forward")
    own = None if own is replaced else own
    place["forward"] = prepared if own is None else _in_precision(own, model, accelerator)

    def detach() -> None:
        if own is not None:
            place["forward"] = own
        engine.detach()
        place["forward"] = prepared

    return engine, detach


def _in_precision(forward: Callable[..., object], model: nn.Module, accelerator: Accelerator) -> object:
    """Return a forward wrapped like in ``Accelerator.prepare_model``."""

    def run(_: nn.Module, *args: object, **kwargs: object) -> object:
        with accelerator.autocast():
            return forward(*args, **kwargs)

    return MethodType(convert_outputs_to_fp32(run), model)
