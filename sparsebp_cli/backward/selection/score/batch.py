"""Targets and padding of a batch, from its labels and mask.

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
    """Return the token that each position predicts, (B, T), -100 where there is none.

    ``labels_BT`` is as transformers' models take it: the entry at t is the token at t.
    """
    return pad(labels_BT[:, 1:], (0, 1), value=IGNORED)


def real_positions(arguments: Mapping[str, Any], like_BT: Tensor) -> Tensor:
    """Return which positions are not padding, as a boolean (B, T); only a two-dimensional ``attention_mask`` tells."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask != 0
    return torch.ones_like(like_BT, dtype=torch.bool)
