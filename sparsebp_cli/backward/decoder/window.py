"""Attentions with a buffer that marks to which keys each position may attend, such as gpt_neo's windows.

They slice the buffer by their numbers of queries and keys, as if these were all positions. So if an attention runs on
some rows, this module moves the window into the mask, and lets the buffer allow all keys.

Shape letters: B examples, T positions, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.layout import AttentionLayout


def with_window(mask_B1TT: Tensor, core: nn.Module, layout: AttentionLayout) -> Tensor:
    """Return an additive mask that also excludes keys that an attention's buffer excludes."""
    if layout.window is None:
        return mask_B1TT
    length = mask_B1TT.shape[-1]
    allowed_11TT = core.get_buffer(layout.window)[..., :length, :length]
    mask = mask_B1TT.float()  # such an attention adds it to scores in this precision
    return mask + torch.zeros_like(mask[:1]).masked_fill_(~allowed_11TT, torch.finfo(mask.dtype).min)


@contextmanager
def without_window(core: nn.Module, layout: AttentionLayout, num_keys: int) -> Iterator[None]:
    """Let an attention's buffer allow all keys inside the block, in which it attends to at most ``num_keys``."""
    if layout.window is None:
        yield
        return
    buffer = core.get_buffer(layout.window)
    setattr(core, layout.window, buffer.new_ones(()).expand(1, 1, num_keys, num_keys))
    try:
        yield
    finally:
        setattr(core, layout.window, buffer)
