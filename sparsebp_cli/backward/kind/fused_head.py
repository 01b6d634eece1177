"""Detection of trl's fused head.

Trainers of trl replace the forward of the model that they train (``add_fused_lm_head``, trl 1.16). Called with
``fused_lm_head=True``, it runs the base model and returns log-probabilities of the labels, (B, T - 1), not logits. It
also accepts shifted labels, as under sequence parallelism. Extensions pass the labels of selected rows in this form.
"""

from __future__ import annotations

from torch import nn

ARGUMENT = "fused_lm_head"


def has_fused_head(model: nn.Module) -> bool:
    """Return whether the forward of a model is trl's."""
    return ARGUMENT in (getattr(model.__dict__.get("forward"), "__kwdefaults__", None) or {})
