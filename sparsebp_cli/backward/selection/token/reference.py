"""The reference of token selection: computes all positions, with masks and detached keys and values.

Shape letters: B examples, T positions, H heads, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from sparsebp_cli.backward.decoder.decoder import Decoder, Layer, without_checkpointing
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards


@contextmanager
def detached(decoder: Decoder, carries_BT: Tensor) -> Iterator[None]:
    """Detach keys and values of positions that carry no gradient, in every layer, while the model's own forward runs.

    That is enough: such a position affects the loss only through its keys and values, since its own prediction is not
    trained.
    """
    cache = _Detaching(carries_BT[:, None, :, None])

    def run(layer: Layer, *args: object, **kwargs: object) -> object:
        arguments = dict(zip(layer.argument_names, args, strict=False)) | kwargs
        return call_module(layer.module, **(arguments | {layer.attention.cache: cache}))

    replacements = [(layer.module, partial(run, layer)) for layer in decoder.layers]
    # Without checkpointing, because a repeated forward in the backward would not run the override.
    with replace_forwards(replacements), without_checkpointing(*(layer.module for layer in decoder.layers)):
        yield


class _Detaching:
    """A cache that returns its input, detached where positions carry no gradient."""

    def __init__(self, carries: Tensor) -> None:
        self._carries = carries

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return self._detach(keys), self._detach(values)

    def _detach(self, x_BHTD: Tensor) -> Tensor:
        return torch.where(self._carries, x_BHTD, x_BHTD.detach())
