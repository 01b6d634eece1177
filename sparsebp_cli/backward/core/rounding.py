"""By how much a choice by count may lie above its budget without being a lie."""

from __future__ import annotations

from math import prod

from torch import Tensor

from sparsebp_cli.policy import Blocks, Columns, Elements, Rows, Selection, Site


def allowed_share(budget: float, selection: Selection | None, grad_NO: Tensor, site: Site, *, pads: bool) -> float:
    """Return the share of a site's work that a policy may leave, with counts rounded up and examples padded.

    Args:
        budget: The share that the policy says it keeps, in (0, 1].
        selection: What it kept; None: everything.
        grad_NO: Of what; not empty.
        site: Where.
        pads: Whether every example multiplies as many rows as the one that keeps most.

    Returns:
        A share, at least the budget. Waits for the device where examples are padded.
    """
    padded = pad_up(selection, len(grad_NO), site.num_examples) if pads else 0.0
    return max(padded, round_up(budget, selection, grad_NO))


def round_up(budget: float, selection: Selection | None, grad_NO: Tensor) -> float:
    """Return the share of a site's work that a policy may leave without breaking its claim.

    What is kept or cut only together is a unit: a row (one of each example, where each gives as many), a column, a
    block, an entry of each row. A share of n units is at most ``max(1, ceil(budget * n))`` of them, so at most one more
    than the budget; blocks at the edge of a grid are multiplied as if they were whole. What was kept counts as long as
    that explains it.

    Args:
        budget: The share that the policy says it keeps, in (0, 1].
        selection: What it kept; None: everything.
        grad_NO: Of what; not empty.

    Returns:
        A share, at least the budget; more than 1 where blocks at the edges make it so.
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
    return max(budget, min(kept, most))


def pad_up(selection: Selection | None, num_rows: int, num_examples: int) -> float:
    """Return the share of rows that is multiplied where every example has as many as the one that keeps most.

    Args:
        selection: What was kept.
        num_rows: N.
        num_examples: B; each has as many rows.

    Returns:
        A share in [0, 1]; 0 for a selection of anything else than rows. Waits for the device.
    """
    if not isinstance(selection, Rows) or selection.index_K.numel() == 0:
        return 0.0
    example_K = selection.index_K.div(num_rows // num_examples, rounding_mode="floor")
    return int(example_K.bincount().max()) * num_examples / num_rows
