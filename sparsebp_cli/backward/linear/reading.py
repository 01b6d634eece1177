"""Norms that selectors read at linears, each computed once for all linears that read one tensor.

Shape letters: N rows (= B*T), D input width, O output width.
"""

from __future__ import annotations

import weakref
from typing import final

import torch
from torch import Tensor

from sparsebp_cli.backward.observe.internals import version_of
from sparsebp_cli.policy import Reading, choice


@final
class SharedNorm:
    """Cache for the row norms of the latest input, which queries, keys and values share.

    The cache drops its entry together with the input itself, or when a linear reads another input.
    """

    def __init__(self) -> None:
        self._input: weakref.ref[Tensor] | None = None
        self._version, self._norm_N = 0, torch.empty(0)

    def of(self, x: Tensor) -> Tensor:
        """Return the norm of each row of an input, (N,)."""
        last = None if self._input is None else self._input()
        # See decision 103.
        if last is not x or self._version != version_of(x):
            self._norm_N = row_norm(x)
            self._input, self._version = weakref.ref(x, self._drop), version_of(x)
        return self._norm_N

    def _drop(self, ref: object) -> None:
        if ref is self._input:
            self._input, self._norm_N = None, torch.empty(0)


def row_norm(x: Tensor) -> Tensor:
    """Return the norm of each row, (N,); all leading dimensions are rows."""
    return choice.norm(x.detach().reshape(-1, x.shape[-1]), 1)


def read_before(reads: frozenset[Reading], x: Tensor, weight_OD: Tensor, shared: SharedNorm) -> dict[Reading, Tensor]:
    """Return the norms that are known before a linear multiplies. The backward reads the input itself."""
    readings: dict[Reading, Tensor] = {}
    if "input_norm" in reads:
        readings["input_norm"] = shared.of(x)
    if "weight_norm" in reads:
        readings["weight_norm"] = choice.norm(weight_OD.detach(), 1)
    return readings
