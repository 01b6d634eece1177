"""The reference implementation of token selection: compute all positions, and detach positions without gradient.

Shape letters: B examples, T positions, H heads, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from sparsebp_cli.backward.decoder.decoder import Decoder, Layer, without_checkpointing
from sparsebp_cli.backward.decoder.kv_cache import StandInKV
from sparsebp_cli.backward.patch.forward import call_module, replace_forwards


@contextmanager
def detached(decoder: Decoder, carries_BT: Tensor) -> Iterator[None]:
    """Detach keys and values of positions that carry no gradient, in every layer, while the model's own forward runs.

    This suffices: such a position affects the loss only through its keys and values, since its own prediction is not
    trained.
    """
    carries_B1T1 = carries_BT[:, None, :, None]
    cache = _Detaching(carries_B1T1)
    cores = [getattr(layer.core, name) for layer in decoder.layers for name in layer.attention.expands]
    expanding = [(module, partial(_expand, module, module.__dict__.get("forward"), carries_B1T1)) for module in cores]

    def run(layer: Layer, *args: object, **kwargs: object) -> object:
        arguments = dict(zip(layer.argument_names, args, strict=False)) | kwargs
        return call_module(layer.module, **(arguments | {layer.attention.cache: cache}))

    replacements = [(layer.module, partial(run, layer)) for layer in decoder.layers]
    # Without checkpointing, because a rerun in the backward would not use the override.
    with (
        replace_forwards([*expanding, *replacements]),
        without_checkpointing(*(layer.module for layer in decoder.layers)),
    ):
        yield


def _expand(
    module: nn.Module, covered: Callable[[Tensor], Tensor] | None, carries_B1T1: Tensor, x_B1TD: Tensor
) -> Tensor:
    """Run a module that expands cached values to keys and values, and detach its output at the same positions."""
    output: Tensor = call_module(module, x_B1TD) if covered is None else covered(x_B1TD)
    return torch.where(carries_B1T1, output, output.detach())


class _Detaching(StandInKV):
    """A cache that returns its input, detached where positions carry no gradient."""

    def __init__(self, carries: Tensor) -> None:
        self._carries = carries

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return self._detach(keys), self._detach(values)

    def _detach(self, x_BHTD: Tensor) -> Tensor:
        return torch.where(self._carries, x_BHTD, x_BHTD.detach())
