"""Distribute bits among saved inputs: more to inputs whose rounding changes the gradient more.

After Xiaoxuan Liu et al., "GACT" (ICML 2022), https://arxiv.org/abs/2206.11357, for
:mod:`~sparsebp_shelf.policies.gact`. Shape letters: K entries of a gradient, J inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FEWEST, MOST = 1, 8  # range of bits for an input; each allowed number is twice the one before


def find_sensitivity(one_K: Tensor, other_K: Tensor, fine_K: Tensor) -> float:
    """Return twice the variance that an input with 1 bit adds to the gradient, estimated from two 1-bit draws and one
    with 8 bits, where rounding is small. At least 0: the larger of the squared distance of the draws and twice their
    larger squared distance to the third."""
    import torch

    pairs = ((1.0, one_K, other_K), (2.0, one_K, fine_K), (2.0, other_K, fine_K))
    return float(torch.stack([factor * (a - b).double().square().sum() for factor, a, b in pairs]).max())


def share_bits(sensitivity_J: Sequence[float], entries_J: Sequence[float], mean: float) -> list[int]:
    """Return the bits of each input, so that the sum of ``sensitivity * 2 ** (-2 * (bits - 1))`` is small.

    All inputs begin with 1 bit. The function repeatedly doubles the bits of the input whose doubling reduces the sum
    most for each bit spent, as long as enough bits are left for it.

    Args:
        sensitivity_J: Variance that each input adds with 1 bit, at least 0, up to a common factor, as from
            :func:`find_sensitivity`.
        entries_J: Number of entries of each input, above 0.
        mean: Mean bits of an entry, over all inputs, in [1, 8].

    Returns:
        (J,), each 1, 2, 4 or 8.
    """
    bits = [FEWEST] * len(sensitivity_J)
    # The factor keeps rounding from losing bits that the mean allows.
    left = (mean - FEWEST) * sum(entries_J) * (1 + 1e-9)

    def find_gain(place: int) -> tuple[float, int]:
        now = bits[place]
        before, after = (4.0 ** (1 - number) for number in (now, 2 * now))
        return sensitivity_J[place] * (before - after) / (now * entries_J[place]), -now

    while fitting := [place for place, now in enumerate(bits) if now < MOST and now * entries_J[place] <= left]:
        best = max(fitting, key=find_gain)
        left -= bits[best] * entries_J[best]
        bits[best] *= 2
    return bits
