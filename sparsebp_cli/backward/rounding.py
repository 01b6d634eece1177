"""By how much a choice by count may lie above its budget without being a lie."""

from __future__ import annotations

from math import prod

from torch import Tensor

from sparsebp_cli.policy import Blocks, Columns, Elements, Rows, Selection


def round_up(budget: float, selection: Selection | None, grad_NO: Tensor) -> float:
    """Return the share of a site's work that a selection by count may leave at most.

    What is kept or cut only together is a unit: a row (one of each example, where each gives as many), a column, a
    block, an entry of each row. A share of n units is at most ``max(1, ceil(budget * n))`` of them, so at most one more
    than the budget; blocks at the edge of a grid are multiplied as if they were whole.

    Args:
        budget: The share that the policy says it keeps, in (0, 1].
        selection: What it kept; None: everything.
        grad_NO: Of what.

    Returns:
        A share in [budget, 1]; the budget itself where nothing is rounded.
    """
    num_rows, num_columns = grad_NO.shape
    match selection:
        case Rows():
            share = budget + selection.num_examples / num_rows
        case Columns() | Elements():
            share = budget + 1 / num_columns
        case Blocks():
            block, blocks = prod(selection.block_shape), prod(selection.grid(grad_NO))
            share = (budget * blocks + 1) * block / grad_NO.numel()
        case _:
            share = budget
    return min(1.0, share)
