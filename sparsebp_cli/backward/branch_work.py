"""What one branch's backward costs, dense and with a share of its rows, as FLOPs from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, cast

from torch import Tensor, nn

from sparsebp_cli.backward.report import Claim
from sparsebp_cli.backward.site import find_linears
from sparsebp_cli.policy import Rows, Selection

if TYPE_CHECKING:
    from sparsebp_cli.backward.branch import Branch


@dataclass(frozen=True)
class BranchWork:
    """dgrad and wgrad of a branch's linears and, in an attention, of its products; see
    :class:`sparsebp_cli.backward.binding.Work`.

    Args:
        branch: The branch.
        form: ``stored``, or computed again: ``rows`` of it or the ``whole``.
        batch_shape: The output's shape without features.
        by_rows: Whether linears multiply the kept rows alone.
    """

    branch: Branch
    form: Literal["stored", "rows", "whole"]
    batch_shape: tuple[int, ...]
    by_rows: bool

    def claim(self, selection: type[Selection] | None, budget: float) -> Claim:
        """Return the dense work, and what is left of it.

        Args:
            selection: The kind; None: dense.
            budget: Share of rows that is kept, in (0, 1].

        Returns:
            Dense and claimed; what is computed again counts as claimed.
        """
        sparse = selection is Rows and self.by_rows
        share = budget if sparse and self.form != "whole" else 1.0
        again = self.form != "stored"
        dense = claimed = 0.0
        for linear in self._linears():
            backward = linear.dgrad + linear.wgrad
            work = backward + linear.forward * again
            dense += backward
            claimed += work * (share if linear.by_rows else 1.0)
            if linear.fused and again and sparse:
                claimed += work * share  # queries, keys and values for all positions, then queries for the kept
        forward, backward = self._products()
        dense += backward
        claimed += (forward + backward) * share if again else backward
        return Claim(dense, claimed)

    def _linears(self) -> Iterator[_Linear]:
        attention, num_rows = self.branch.attention, prod(self.batch_shape)
        by_rows = None if attention is None else attention.query + attention.output
        whole = None if attention is None else by_rows + attention.key_value
        for name, module, _ in find_linears(self.branch.core).covered:
            child = name.partition(".")[0]
            weight = cast("Tensor", module.weight)
            flops = 2.0 * num_rows * weight.numel()
            yield _Linear(
                flops,
                flops,
                flops * weight.requires_grad,
                by_rows is None or child in by_rows,
                whole is not None and child not in whole,
            )

    def _products(self) -> tuple[float, float]:
        """Queries times keys and probabilities times values: 4 B T T D forward, 10 B T T D backward, as counted."""
        if self.branch.attention is None or len(self.batch_shape) != 2:
            return 0.0, 0.0
        (num_examples, num_positions), width = self.batch_shape, _attention_width(self.branch)
        square = float(num_examples * num_positions * num_positions * width)
        return 4.0 * square, 10.0 * square


@dataclass(frozen=True)
class _Linear:
    forward: float
    dgrad: float
    wgrad: float
    by_rows: bool
    fused: bool


def _attention_width(branch: Branch) -> int:
    """Heads times width of a head: what the output projection reads."""
    assert branch.attention is not None
    output: nn.Module = getattr(branch.core, branch.attention.output[0])
    return int(output.nx if hasattr(output, "nx") else output.in_features)  # type: ignore[arg-type]
