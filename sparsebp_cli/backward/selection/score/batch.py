"""What the labels and the padding mask of a batch say of its positions.

Shape letters: B examples, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebp_cli.backward.selection.score.scorer import IGNORED


def next_tokens(labels_BT: Tensor) -> Tensor:
    """Return the token that each position is to predict, -100 where there is none.

    Args:
        labels_BT: As transformers' models take them: the entry at t is the token at t.

    Returns:
        (B, T).
    """
    return pad(labels_BT[:, 1:], (0, 1), value=IGNORED)


def real_positions(arguments: Mapping[str, Any], like_BT: Tensor) -> Tensor:
    """Return which positions are no padding.

    Args:
        arguments: The forward's; only an ``attention_mask`` of two dimensions speaks of padding.
        like_BT: Any tensor of the batch.

    Returns:
        Boolean, (B, T).
    """
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask != 0
    return torch.ones_like(like_BT, dtype=torch.bool)
