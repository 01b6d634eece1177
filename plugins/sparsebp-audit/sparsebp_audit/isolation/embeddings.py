"""The embeddings of a batch, as leaves whose gradient shows which examples an output reads.

Shape letters: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Embeddings:
    """The embeddings of a batch's tokens, as leaves of the graph. Each forward makes new ones.

    A forward hook at every embedding of tokens replaces its output. ``size`` is (B, T) of the tokens.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], size: tuple[int, int]) -> None:
        self.leaves: list[Tensor] = []
        self._model, self._inputs, self._size = model, inputs, size

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Collect the leaves of the forwards in the block."""
        tables = [module for module in self._model.modules() if isinstance(module, nn.Embedding)]
        handles = [table.register_forward_hook(self._replace) for table in tables]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def open_inputs(self) -> dict[str, Any]:
        """Return the arguments. Floating-point values of positions, such as embeddings, are leaves."""
        opened = dict(self._inputs)
        for name, value in self._inputs.items():
            if (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and value.dim() > 1
                and value.shape[0] == self._size[0]
                and "mask" not in name
            ):
                opened[name] = value.detach().requires_grad_()
                self.leaves.append(opened[name])
        return opened

    def _replace(self, _module: nn.Module, args: tuple[object, ...], output: object) -> object:
        ids = args[0] if args else None
        if not (isinstance(ids, Tensor) and isinstance(output, Tensor)) or ids.shape[:1] != self._size[:1]:
            return None
        if output.shape[: ids.dim()] != ids.shape:
            return None  # embeddings of positions alone
        tokens = self._inputs.get("input_ids")
        if isinstance(tokens, Tensor) and tokens.dim() == 2:  # a model may put its own prompt before them
            own = ids[:, -tokens.shape[1] :] if ids.dim() == 2 else ids
            if own.shape != tokens.shape or not torch.equal(own, tokens):
                return None  # embeddings of positions or types, not of tokens
        leaf = output.detach().requires_grad_()
        self.leaves.append(leaf)
        return leaf.clone()  # a model may write into it
