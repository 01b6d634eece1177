"""Selections of the largest scores, the last step of most gradient policies. The policy computes the scores.

All functions select by count, ``max(1, round(keep * number))``, so no operation waits for a device. All indices are
ascending, so that gathers read memory forwards.

Shape letters: N rows (= B*T), O output width, K kept.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from sparsebp_cli.policy import kernel
from sparsebp_cli.policy.selection import Blocks, Columns, Elements, Rows, TwoToFour

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


# On a CPU, norms of float32 need one read instead of four if squares neither underflow nor overflow. Within these
# limits, entries above 1e-10 of the largest count. Rows longer than _WIDEST would lose precision in one sum.
_LEAST_NORM, _MOST_NORM, _WIDEST = 1e-6, 1e18, 1 << 16


def count_kept(keep: float, number: int) -> int:
    """Return how many of ``number`` items a fraction ``keep`` in (0, 1] keeps: at least 1."""
    return max(1, round(keep * number))


def largest(score: Tensor, keep: float, groups: int = 1) -> Tensor:
    """Return the indices of the largest scores, ascending.

    Args:
        score: Scores of any shape; the function flattens them.
        keep: Fraction of the scores that is kept, in (0, 1].
        groups: Number of equal parts of the flat scores; each part keeps the same number.

    Returns:
        int64, (K,): indices into the flat scores, ascending.
    """
    import torch

    if groups == 1:  # needs fewer small operations, which each linear repeats at every step
        score_N = score.reshape(-1)
        return score_N.topk(count_kept(keep, len(score_N)), sorted=False).indices.sort().values
    parts = score.reshape(groups, -1)
    index = parts.topk(count_kept(keep, parts.shape[1]), dim=1, sorted=False).indices.sort(dim=1).values
    return (index + torch.arange(groups, device=score.device)[:, None] * parts.shape[1]).flatten()


def choose_rows(score_N: Tensor, keep: float, num_examples: int = 1) -> Rows:
    """Keep the rows of largest score.

    Args:
        score_N: One score a row.
        keep: Fraction of the rows that is kept, in (0, 1].
        num_examples: Number of equal parts of the rows; each part keeps the same number.

    Returns:
        Unweighted rows.
    """
    return Rows(largest(score_N, keep, num_examples), num_examples=num_examples)


def choose_columns(score_O: Tensor, keep: float) -> Columns:
    """Keep the output features of largest score, a fraction ``keep`` in (0, 1]; ``score_O`` has one score a feature."""
    return Columns(largest(score_O, keep))


def choose_elements(score_NO: Tensor, keep: float, groups: int = 1) -> Elements:
    """Keep the single entries of largest score.

    Args:
        score_NO: One score an entry.
        keep: Fraction of the entries that is kept, in (0, 1].
        groups: 1 to select over the whole gradient, N within each row, B within each example.

    Returns:
        Unweighted entries.
    """
    return Elements(largest(score_NO, keep, groups))


def without_underflow(grad_NO: Tensor) -> Tensor:
    """Return a gradient scaled so that its largest entry is about 1 and squares of entries do not underflow.

    The factor is a power of two, so norms keep their order to the last bit where nothing underflowed. The function does
    not wait for the device.

    Args:
        grad_NO: float32 or float64.

    Returns:
        A scaled copy.
    """
    return grad_NO * find_scale(grad_NO) if grad_NO.numel() else grad_NO


def norm(matrix_NO: Tensor, dim: int) -> Tensor:
    """Return 2-norms along a dimension, (N,) for ``dim=1`` and (O,) for ``dim=0``, without underflow of squares.

    Args:
        matrix_NO: Rows by features, of any floating-point dtype.
        dim: The dimension that is summed over.

    Returns:
        float32, or float64 for a float64 matrix.
    """
    import torch

    dtype = torch.promote_types(matrix_NO.dtype, torch.float32)
    if kernel.is_on_gpu(matrix_NO) and dtype == torch.float32:
        return _norm_on_cuda(matrix_NO, dim)
    matrix_NO = matrix_NO.to(dtype)
    if matrix_NO.numel() == 0:
        return matrix_NO.sum(dim)
    norm_N = _norm_of_rows(matrix_NO) if dim == 1 else None
    if norm_N is not None:
        return norm_N
    scale = find_scale(matrix_NO)
    squares = (matrix_NO * scale).square_().sum(dim)  # vector_norm over columns takes ten times as long
    return squares.sqrt_().div_(scale)


def _norm_of_rows(matrix_NO: Tensor) -> Tensor | None:
    """Return the norms of the rows from one read of each, or None where that is not exact enough."""
    import torch

    if not _fits_once(matrix_NO) or matrix_NO.shape[1] > _WIDEST:
        return None
    norm_N: Tensor = torch.linalg.vector_norm(matrix_NO, dim=1)
    return norm_N if _LEAST_NORM < float(norm_N.max()) < _MOST_NORM else None  # no wait for a device


def _fits_once(matrix_NO: Tensor) -> bool:
    import torch

    return matrix_NO.dtype == torch.float32 and matrix_NO.device.type == "cpu" and matrix_NO.numel() > 0


def _norm_on_cuda(matrix_NO: Tensor, dim: int) -> Tensor:
    """Return norms from one read of the matrix: by Triton's kernels, or in float64, where squares do not underflow."""
    import torch

    operation = kernel.find(matrix_NO)
    if operation is not None:
        found: Tensor = operation.row_norm(matrix_NO) if dim == 1 else operation.column_norm(matrix_NO)
        return found
    norm_in_double: Tensor = torch.linalg.vector_norm(matrix_NO, dim=dim, dtype=torch.float64)
    return norm_in_double.to(torch.float32)


def size(matrix_NO: Tensor, dim: int, order: int = 2) -> Tensor:
    """Return sizes along a dimension, (N,) for ``dim=1`` and (O,) for ``dim=0``, that sort in the order of the norms.
    The order of 2-norms is right even where squares of entries would underflow.

    Args:
        matrix_NO: Rows by features, of any floating-point dtype.
        dim: The dimension that is summed over.
        order: 1 for the sum of magnitudes, 2 for the 2-norm.

    Returns:
        float32, or float64 for a float64 matrix.
    """
    import torch

    dtype = torch.promote_types(matrix_NO.dtype, torch.float32)
    if kernel.is_on_gpu(matrix_NO) and order == 2:
        return norm(matrix_NO, dim)
    if dim == 0 and not kernel.is_on_gpu(matrix_NO):
        # Squared norms have the same order; vector_norm over columns takes ten times as long (torch 2.13, CPU).
        return _sum_powers(matrix_NO, order, lambda power_NO: power_NO.sum(0))
    if order == 2:
        norm_N = _norm_of_rows(matrix_NO)
        if norm_N is not None:
            return norm_N
        matrix_NO = without_underflow(matrix_NO.to(dtype))
    found: Tensor = torch.linalg.vector_norm(matrix_NO, ord=order, dim=dim, dtype=dtype)
    return found


def block_size(matrix_NO: Tensor, block_shape: tuple[int, int], order: int = 2) -> Tensor:
    """Return the sizes of blocks in the shape of the grid of blocks, by the definition of :func:`size`.

    Args:
        matrix_NO: Rows by features, of any floating-point dtype.
        block_shape: Rows and features of a block.
        order: 1 for the sum of magnitudes, 2 for the 2-norm.

    Returns:
        float32, or float64 for a float64 matrix.
    """
    import torch

    dtype = torch.promote_types(matrix_NO.dtype, torch.float32)
    if kernel.is_on_gpu(matrix_NO):  # one read; in float64 squares of float32 do not underflow
        norm_in_double: Tensor = torch.linalg.vector_norm(
            _split(matrix_NO, block_shape), ord=order, dim=(1, 3), dtype=torch.float64
        )
        return norm_in_double.to(dtype)
    return _sum_powers(matrix_NO, order, lambda power_NO: sum_blocks(power_NO, block_shape))


def _sum_powers(matrix_NO: Tensor, order: int, add: Callable[[Tensor], Tensor]) -> Tensor:
    """Return sums of magnitudes, or sums of squares that sort in the exact order."""
    import torch

    matrix_NO = matrix_NO.to(torch.promote_types(matrix_NO.dtype, torch.float32))
    if order == 1:
        return add(matrix_NO.abs())
    if _fits_once(matrix_NO):
        found = add(matrix_NO.square())
        if _LEAST_NORM**2 < float(found.max()) < _MOST_NORM**2:  # no wait for a device
            return found
    return add(without_underflow(matrix_NO).square())


def l2_norm(tensor: Tensor) -> Tensor:
    """Return the 2-norm of all entries, 0-d, without underflow of squares: float32, or float64 of a float64 tensor."""
    return norm(tensor.reshape(1, -1), 1)[0]


def l1_norm(tensor: Tensor) -> Tensor:
    """Return the sum of magnitudes, 0-d: float32, or float64 of a float64 tensor."""
    import torch

    return tensor.abs().sum(dtype=torch.promote_types(tensor.dtype, torch.float32))


def find_scale(gradient: Tensor) -> Tensor:
    """Return the power of two by which a gradient is multiplied so that its largest entry is about 1.

    Args:
        gradient: float32 or float64, of any shape, with at least one entry.

    Returns:
        A scalar of the gradient's dtype, on its device; 1.0 for a gradient of zeros.
    """
    import torch

    low, high = torch.aminmax(gradient)  # an infinity norm takes seventeen times as long (torch 2.13, CPU)
    largest_entry = torch.maximum(-low, high)
    most = 126 if gradient.dtype == torch.float32 else 1022  # larger powers of two overflow the dtype
    exponent = -torch.frexp(largest_entry).exponent.clamp(-most, most)
    return torch.ldexp(torch.ones_like(largest_entry), exponent)


def fit_block(block_shape: tuple[int, int], grad_NO: Tensor) -> tuple[int, int]:
    """Return the rows and features of a block, no larger than the gradient."""
    return min(block_shape[0], grad_NO.shape[0]), min(block_shape[1], grad_NO.shape[1])


def sum_blocks(score_NO: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return the sum of the scores in each block, in the shape of the grid of blocks."""
    return _split(score_NO, block_shape).sum((1, 3))


def _split(matrix_NO: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Return the matrix as a grid of blocks, (high, rows, wide, columns), padded with zeros."""
    from torch.nn.functional import pad

    (rows, columns), (num_rows, num_columns) = block_shape, matrix_NO.shape
    missing = -num_columns % columns, -num_rows % rows
    padded = pad(matrix_NO, (0, missing[0], 0, missing[1])) if any(missing) else matrix_NO
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def choose_blocks(score: Tensor, keep: float, block_shape: tuple[int, int]) -> Blocks:
    """Keep the blocks of largest score.

    Args:
        score: One score a block, in the shape of the grid.
        keep: Fraction of the blocks that is kept, in (0, 1].
        block_shape: Rows and features of a block.

    Returns:
        Unweighted blocks.
    """
    return Blocks(largest(score, keep), block_shape)


def choose_two_of_four(score_NO: Tensor) -> TwoToFour:
    """Keep the two of every four neighbouring features with the largest scores, one score an entry."""
    import torch

    operation = kernel.find(score_NO)
    if operation is not None:
        return TwoToFour(operation.two_of_four(score_NO))
    num_rows, num_columns = score_NO.shape
    whole = num_columns // 4 * 4
    mask_NO = torch.ones(score_NO.shape, dtype=torch.bool, device=score_NO.device)
    # Each pair of a group has one winner; if scores are equal, the first entry wins. The two entries with at most one
    # defeat are kept. A top-k of four entries returns the same, at many times the time of these comparisons.
    entries = (
        score_NO[:, :whole].nan_to_num(nan=torch.inf, posinf=torch.inf).reshape(num_rows, whole // 4, 4).unbind(-1)
    )
    defeats = [torch.zeros(entries[0].shape, dtype=torch.uint8, device=score_NO.device) for _ in entries]
    for first, second in combinations(range(4), 2):
        loses = entries[second] > entries[first]
        defeats[first] += loses
        defeats[second] += ~loses
    mask_NO[:, :whole] = (torch.stack(defeats, -1) < 2).view(num_rows, whole)
    return TwoToFour(mask_NO)
