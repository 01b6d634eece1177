"""What a choice of positions means, computed in the obvious way: everything, with masks and detached keys and values.

Shape letters: B examples, T positions, H heads, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebp_cli.backward.decoder.decoder import Decoder, Layer, by_name, unchecked
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards


@contextmanager
def detached(decoder: Decoder, carries_BT: Tensor) -> Iterator[None]:
    """Let keys and values of positions that carry no gradient be constants in every layer.

    Nothing else is to be done: what such a position adds to the loss passes through its keys and values, since its own
    prediction is not trained.

    Args:
        decoder: The model.
        carries_BT: Positions that carry gradient.

    Yields:
        None: As long as the model's own forward runs.
    """
    cache = _Detaching(carries_BT[:, None, :, None])

    def run(layer: Layer, *args: Any, **kwargs: Any) -> Any:
        arguments = by_name(layer.module, args, kwargs)
        return call_module(layer.module, **(arguments | {layer.attention.cache: cache}))

    with ExitStack() as stack, replace_forwards((layer.module, partial(run, layer)) for layer in decoder.layers):
        for layer in decoder.layers:  # a layer that is run again in the backward would find its own forward
            stack.enter_context(unchecked(layer.module))
        yield


class _Detaching:
    """A cache that returns what it is given."""

    def __init__(self, carries: Tensor) -> None:
        self._carries = carries

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._detach(keys), self._detach(values)

    def _detach(self, x_BHTD: Tensor) -> Tensor:
        return torch.where(self._carries, x_BHTD, x_BHTD.detach())
