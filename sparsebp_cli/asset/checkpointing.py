"""Full activation checkpointing of a transformers model, with all supported versions of transformers."""

from __future__ import annotations

from typing import Any


def checkpoint_activations(model: Any, *, use_reentrant: bool = False) -> None:
    """Let a model of transformers, or one inside peft, keep only the inputs of its layers and recompute the rest in the
    backward. ``use_reentrant`` selects the older of PyTorch's two implementations."""
    # transformers 5.18 renamed this method, and the old name warns.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def keep_activations(model: Any) -> None:
    """Undo :func:`checkpoint_activations`.

    Args:
        model: The same.
    """
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()
