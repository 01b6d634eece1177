"""Full activation checkpointing of a transformers model, for all supported versions of transformers."""

from __future__ import annotations

from collections.abc import Callable


def checkpoint_activations(model: object, *, use_reentrant: bool = False) -> None:
    """Make a transformers model, alone or inside peft, keep only the inputs of its layers and recompute the rest in
    backward. ``use_reentrant`` selects the older of PyTorch's two implementations."""
    # transformers 5.18 renamed this method, and the old name warns.
    _find_method(model, "activation_checkpointing_enable", "gradient_checkpointing_enable")(
        {"use_reentrant": use_reentrant}
    )


def keep_activations(model: object) -> None:
    """Undo :func:`checkpoint_activations`: the model keeps the activations that the backward needs."""
    _find_method(model, "activation_checkpointing_disable", "gradient_checkpointing_disable")()


def _find_method(model: object, name: str, earlier_name: str) -> Callable[..., object]:
    method: Callable[..., object] = getattr(model, name, None) or getattr(model, earlier_name)
    return method
