"""Samples of the entries of gradients, to estimate distances between the gradients of several passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from sparsebp_cli.policy import Step

SAMPLED = 100  # entries of a gradient for each entry of its sample


def sample_gradient(gradient: Tensor, name: str, step: Step) -> Tensor:
    """Return random entries of a gradient, the same ones in all trial passes before one step.

    Args:
        gradient: A gradient of any shape, with at least one entry.
        name: Name of the parameter or of its linear, which determines the drawn entries.
        step: The coming step.

    Returns:
        (K,), float32, scaled so that their sum of squares estimates the sum of squares of all entries.
    """
    import torch

    number = gradient.numel()
    num_drawn = -(-number // SAMPLED)
    generator = step.generator(_Draw(f"sample of {name}"))
    index_K = torch.randint(number, (num_drawn,), generator=generator).to(gradient.device)
    # With this scale, the expected squared distance of two samples equals that of the gradients.
    return gradient.reshape(-1)[index_K].float() * float((number / num_drawn) ** 0.5)


@dataclass(frozen=True)
class _Draw:
    name: str
