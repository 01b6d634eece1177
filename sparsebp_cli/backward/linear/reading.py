"""Norms that selectors read at linears, each computed once for all linears that read one tensor.

Shape letters: N rows (= B*T), D input width, O output width.
"""

from __future__ import annotations

from torch import Tensor

from sparsebp_cli.backward.linear.latest_input import LatestInput
from sparsebp_cli.policy import Reading, choice


def row_norm(x: Tensor) -> Tensor:
    """Return the norm of each row, (N,); all leading dimensions are rows."""
    return choice.norm(x.detach().reshape(-1, x.shape[-1]), 1)


def read_before(
    reads: frozenset[Reading], x: Tensor, weight_OD: Tensor, shared: LatestInput[Tensor]
) -> dict[Reading, Tensor]:
    """Return the norms that are known before a linear multiplies. The backward reads the input itself."""
    readings: dict[Reading, Tensor] = {}
    if "input_norm" in reads:
        readings["input_norm"] = shared.of(x, lambda: row_norm(x))
    if "weight_norm" in reads:
        readings["weight_norm"] = choice.norm(weight_OD.detach(), 1)
    return readings
