"""The reference of token selection: computes all positions, with masks and detached keys and values.

Shape letters: B examples, T positions, H heads, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.backward.decoder.decoder import Decoder, Layer, bind_arguments, without_checkpointing
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards


@contextmanager
def detached(decoder: Decoder, carries_BT: Tensor) -> Iterator[None]:
    """Detach keys and values of positions that carry no gradient, in every layer, while the model's own forward runs.

    That is enough: such a position affects the loss only through its keys and values, since its own prediction is not
    trained.
    """
    cache = _Detaching(carries_BT[:, None, :, None])

    def run(layer: Layer, *args: Any, **kwargs: Any) -> Any:
        arguments = bind_arguments(layer.module, args, kwargs)
        return call_module(layer.module, **(arguments | {layer.attention.cache: cache}))

    with ExitStack() as stack, replace_forwards((layer.module, partial(run, layer)) for layer in decoder.layers):
        for layer in decoder.layers:  # a repeated forward in the backward would not run the override
            stack.enter_context(without_checkpointing(layer.module))
        yield


class _Detaching:
    """A cache that returns its input, detached where positions carry no gradient."""

    def __init__(self, carries: Tensor) -> None:
        self._carries = carries

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._detach(keys), self._detach(values)

    def _detach(self, x_BHTD: Tensor) -> Tensor:
        return torch.where(self._carries, x_BHTD, x_BHTD.detach())
