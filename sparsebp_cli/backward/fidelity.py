"""How near a policy's gradient is to the dense one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fidelity:
    """Two gradients compared, all parameters together.

    Args:
        cosine: Of the angle between them, in [-1, 1]; None when one of them is zero.
        relative_error: Norm of the difference over the norm of the dense gradient; None when that is zero.
    """

    cosine: float | None
    relative_error: float | None


def compare_gradients(policy: Sequence[Tensor | None], dense: Sequence[Tensor | None]) -> Fidelity:
    """Compare a policy's gradients with the dense ones, accumulating in float64.

    Args:
        policy: One gradient a parameter; None is zero.
        dense: The same parameters' dense gradients.

    Returns:
        Cosine and relative error.

    Raises:
        ValueError: The lists have different lengths.
    """
    if len(policy) != len(dense):
        raise ValueError(f"{len(policy)} gradients against {len(dense)}")
    dot = norm_policy = norm_dense = norm_error = 0.0
    for ours, theirs in zip(policy, dense, strict=True):
        a = None if ours is None else ours.detach().to(torch.float64).flatten()
        b = None if theirs is None else theirs.detach().to(torch.float64).flatten()
        norm_policy += 0.0 if a is None else float(a.dot(a))
        norm_dense += 0.0 if b is None else float(b.dot(b))
        if a is not None and b is not None:
            dot += float(a.dot(b))
            norm_error += float((a - b).square().sum())
        elif a is not None or b is not None:
            left = b if a is None else a
            assert left is not None
            norm_error += float(left.dot(left))
    norms = (norm_policy * norm_dense) ** 0.5
    return Fidelity(
        cosine=min(1.0, max(-1.0, dot / norms)) if norms else None,
        relative_error=(norm_error / norm_dense) ** 0.5 if norm_dense else None,
    )
