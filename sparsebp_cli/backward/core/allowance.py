"""The fraction of a site's work that a policy may execute: its estimate, with counts rounded up."""

from __future__ import annotations

from math import prod

from torch import Tensor

from sparsebp_cli.policy import Blocks, Columns, Elements, Rows, Selection


def round_up(budget: float, selection: Selection | None, grad_NO: Tensor, *, is_mean: bool = False) -> float:
    """Return the fraction of a site's work that a policy may execute without exceeding its estimate; at least the
    budget.

    Entries that can only be kept together form a unit: a row (of each example, if all keep the same number), a column,
    a block, or an entry of each row. A policy may keep ``max(1, ceil(budget * n))`` of n units, at most one more than
    the budget. Kernels multiply whole blocks at the edge of a grid, so the result may exceed 1. The result is at most
    the fraction that was kept, unless the budget is larger. ``is_mean``: the budget is a mean over draws, so that one
    draw may keep more.
    """
    num_rows, num_columns = grad_NO.shape
    match selection:
        case Rows():
            kept, most = selection.index_K.numel() / num_rows, budget + selection.num_examples / num_rows
        case Columns():
            kept, most = selection.index_K.numel() / num_columns, budget + 1 / num_columns
        case Elements():
            kept, most = selection.index_K.numel() / grad_NO.numel(), budget + 1 / num_columns
        case Blocks():
            block = prod(selection.block_shape) / grad_NO.numel()
            kept, most = selection.index_K.numel() * block, (budget * prod(selection.grid(grad_NO)) + 1) * block
        case _:
            return budget
    return max(budget, kept if is_mean else min(kept, most))
