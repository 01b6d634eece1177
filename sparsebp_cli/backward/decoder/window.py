"""Attentions with a buffer of the keys that each position may attend to, such as gpt_neo's windows.

They cut it by the numbers of their queries and keys, as if these were all positions. So where one runs on some rows,
its mask says what the buffer says, and the buffer allows everything.

Shape letters: B examples, T positions, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.layout import AttentionLayout


def with_window(mask_B1TT: Tensor, core: nn.Module, layout: AttentionLayout) -> Tensor:
    """Return an additive mask that also excludes what an attention's buffer excludes; as it is if there is none."""
    if layout.window is None:
        return mask_B1TT
    length = mask_B1TT.shape[-1]
    allowed_11TT = core.get_buffer(layout.window)[..., :length, :length]
    mask = mask_B1TT.float()  # such an attention adds it to scores of this precision
    return mask + torch.zeros_like(mask[:1]).masked_fill_(~allowed_11TT, torch.finfo(mask.dtype).min)


@contextmanager
def without_window(core: nn.Module, layout: AttentionLayout, num_keys: int) -> Iterator[None]:
    """Let the buffer of an attention allow everything in the block, in which it attends to at most so many keys."""
    if layout.window is None:
        yield
        return
    buffer = core.get_buffer(layout.window)
    setattr(core, layout.window, buffer.new_ones(()).expand(1, 1, num_keys, num_keys))
    try:
        yield
    finally:
        setattr(core, layout.window, buffer)
