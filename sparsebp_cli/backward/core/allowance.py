"""The share of a site's work that a policy may execute: what it claims, with counts rounded up and examples padded."""

from __future__ import annotations

from math import prod

from torch import Tensor

from sparsebp_cli.policy import Blocks, Columns, Elements, Rows, Selection, Site


def allowed_share(
    budget: float, selection: Selection | None, grad_NO: Tensor, site: Site, *, pads: bool, is_mean: bool = False
) -> float:
    """Return the share of a site's work that a policy may execute, with counts rounded up and examples padded.

    ``budget`` is the share that the policy claims to keep, in (0, 1]; the result is at least that. ``pads`` says that
    every example multiplies as many rows as the one that keeps most; reading that count synchronises with the device.
    ``is_mean`` says that the budget is a mean over draws, so that one draw may keep more.
    """
    padded = pad_up(selection, len(grad_NO), site.num_examples) if pads else 0.0
    return max(padded, round_up(budget, selection, grad_NO, is_mean=is_mean))


def round_up(budget: float, selection: Selection | None, grad_NO: Tensor, *, is_mean: bool = False) -> float:
    """Return the share of a site's work that a policy may execute without breaking its claim; at least the budget.

    Entries that can only be kept together form a unit: a row (one of each example, where each has as many), a column, a
    block, an entry of each row. A share of n units is at most ``max(1, ceil(budget * n))`` of them, so at most one more
    than the budget. Blocks at the edge of a grid are multiplied whole, so the result may exceed 1. It never exceeds
    what was really kept, unless the budget does.
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


def pad_up(selection: Selection | None, num_rows: int, num_examples: int) -> float:
    """Return the share of rows multiplied if every example is padded to the one that keeps most; in [0, 1].

    0 for a selection of anything but rows. Synchronises with the device.
    """
    if not isinstance(selection, Rows) or selection.index_K.numel() == 0:
        return 0.0
    example_K = selection.index_K.div(num_rows // num_examples, rounding_mode="floor")
    return int(example_K.bincount().max()) * num_examples / num_rows
