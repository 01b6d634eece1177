"""Full activation checkpointing of a transformers model, under the names of every version that is supported."""

from __future__ import annotations

from typing import Any


def checkpoint_activations(model: Any, *, use_reentrant: bool = False) -> None:
    """Let a model keep the inputs of its layers only, and compute the rest again in the backward pass.

    Args:
        model: From transformers, or one of them inside peft.
        use_reentrant: The older of PyTorch's two ways.
    """
    # Renamed in transformers 5.18; the name before warns since.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def keep_activations(model: Any) -> None:
    """Undo :func:`checkpoint_activations`.

    Args:
        model: The same.
    """
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()
