"""Random selections of a fixed size with chosen probabilities: the last step of most unbiased gradient estimators.

A policy scores its rows (or columns). :func:`water_fill` turns scores into inclusion probabilities that sum to the
number kept. :func:`draw` draws exactly that number. The policy multiplies kept rows by 1 / probability, so that their
sum is unbiased. Probabilities in proportion to the scores minimize its variance.

The probabilities come from Ziteng Wang, Jianfei Chen and Jun Zhu, "Efficient Backpropagation with Variance-Controlled
Adaptive Sampling" (ICLR 2024), https://arxiv.org/abs/2402.17227. They draw each row independently, so the number of
rows is random and the host waits for it. We draw systematically in random order: W. G. Madow, "On the Theory of
Systematic Sampling, II" (Annals of Mathematical Statistics, 1949). This has the same probabilities, nearly the same
variance and a fixed number.

Sums are of integers, so they are exact in any order: the same generator always yields the same draw, even on a GPU.
No function except :func:`draw_independently` waits for the device.

Shape letters: N rows (or other candidates), K kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BITS = 40  # a probability is a multiple of 2^-40, unless there are more than 2^21 rows


def water_fill(score_N: Tensor, num_kept: int) -> Tensor:
    """Return inclusion probabilities ``min(1, c * score)``, with the ``c`` for which they sum to ``num_kept``.

    Scores below about 1e-12 of the largest are raised to it, so that each row may be drawn and no weight is infinite.
    NaN counts as infinity: such a row is drawn with certainty, so that the gradient is NaN as without selection.

    Args:
        score_N: Scores, at least 0, such as the product of the norms of the two rows that are multiplied.
        num_kept: Number of rows to draw, in [1, N].

    Returns:
        float64, (N,), each in (0, 1], on the device of the scores.

    Raises:
        ValueError: ``score_N`` has more than one dimension, or ``num_kept`` is not in [1, N].
    """
    import torch

    _check(score_N, num_kept)
    number = score_N.numel()
    score_N = score_N.double().nan_to_num(torch.inf).nan_to_num().clamp(min=0.0)
    largest = score_N.max().clamp(min=torch.finfo(torch.float64).tiny)
    grid = 1 << _bits(number)
    level_N = (score_N / largest * grid).long().clamp(min=1)
    sorted_N, order_N = level_N.sort(descending=True, stable=True)
    rest_N = level_N.sum() - sorted_N.cumsum(0) + sorted_N  # of this one and all smaller ones
    place_N = torch.arange(number, device=score_N.device)
    # The largest is certain if its share of num_kept exceeds 1. The same test applies to the next among the rest.
    num_certain = (sorted_N * (num_kept - place_N) > rest_N).sum()
    last = num_certain.clamp(max=number - 1)  # if all are certain, the factor is not used
    factor = (num_kept - num_certain) / rest_N.gather(0, last[None]).double()
    probability_N = torch.where(place_N < num_certain, 1.0, (sorted_N * factor).clamp(max=1.0))
    return torch.empty_like(probability_N).index_copy_(0, order_N, probability_N)


def draw(probability_N: Tensor, num_kept: int, generator: torch.Generator) -> Tensor:
    """Draw exactly ``num_kept`` different indices, index ``n`` with probability ``probability_N[n]``.

    The function arranges the indices in random order on a line, each as a segment as long as its probability. It draws
    the indices whose segments contain a whole number plus one common random offset.

    Args:
        probability_N: Probability of each index, in (0, 1], summing to ``num_kept`` up to rounding, such as from
            :func:`water_fill`.
        num_kept: Number of indices to draw, in [1, N].
        generator: ``step.generator(site, device)``, on the device of the probabilities.

    Returns:
        int64, (K,), ascending.

    Raises:
        ValueError: ``probability_N`` has more than one dimension, or ``num_kept`` is not in [1, N].
    """
    import torch

    _check(probability_N, num_kept)
    device, number = probability_N.device, probability_N.numel()
    one = 1 << _bits(number)
    order_N = torch.randperm(number, generator=generator, device=device)
    length_N = (probability_N.double()[order_N] * one).round().long().clamp(0, one)
    end_N = length_N.cumsum(0)
    # Rounding leaves the sum a little off. Lengthen or shorten the first segments by the difference. No segment becomes
    # longer than one, so that no point hits a segment twice, and the last point hits one.
    lacking = num_kept * one - end_N[-1]
    end_N = end_N + torch.minimum((one - length_N).cumsum(0), lacking.clamp(min=0))
    end_N = end_N - torch.minimum(length_N.cumsum(0), (-lacking).clamp(min=0))
    offset = torch.randint(one, (1,), generator=generator, device=device)
    point_K = torch.arange(num_kept, device=device) * one + offset
    return order_N[torch.searchsorted(end_N, point_K, right=True)].sort().values


def draw_by_score(score_N: Tensor, num_kept: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw with probabilities in proportion to scores: :func:`water_fill`, :func:`draw` and :func:`weigh` at once.

    Args:
        score_N: Scores, at least 0, as for :func:`water_fill`.
        num_kept: Number of indices to draw, in [1, N].
        generator: ``step.generator(site, device)``, on the device of the scores.

    Returns:
        The drawn indices, int64, (K,), ascending, and the weight of each, float32, (K,).
    """
    probability_N = water_fill(score_N, num_kept)
    index_K = draw(probability_N, num_kept, generator)
    return index_K, weigh(probability_N, index_K)


def draw_independently(probability_N: Tensor, generator: torch.Generator) -> Tensor:
    """Draw each index independently, ``n`` with probability ``probability_N[n]``. Their number is random, perhaps 0.

    The host waits for the count. Prefer :func:`draw`, except to reproduce a published method.

    Args:
        probability_N: Probability of each index, in [0, 1].
        generator: ``step.generator(site, device)``, on the device of the probabilities.

    Returns:
        int64, ascending.
    """
    import torch

    uniform_N = torch.rand(probability_N.shape, dtype=torch.float64, generator=generator, device=probability_N.device)
    return (uniform_N < probability_N).nonzero().flatten()


def weigh(probability_N: Tensor, index_K: Tensor) -> Tensor:
    """Return 1 / probability for each drawn index: the weight that makes a sum unbiased.

    Args:
        probability_N: Probabilities of the draw, in (0, 1].
        index_K: The drawn indices, int64.

    Returns:
        float32, (K,).
    """
    return probability_N.index_select(0, index_K).reciprocal().float()


def variance(size_N: Tensor, probability_N: Tensor) -> Tensor:
    """Return the variance of an independently drawn, weighted sum: the sum of ``size^2 * (1 / probability - 1)``.

    The variance of a draw of fixed size is close to it. Its exact value depends on pairs, and must be measured.

    Args:
        size_N: Norm of each term of the sum, such as of a row's part of the weight gradient.
        probability_N: Probability with which each term is drawn, in (0, 1].

    Returns:
        A float64 scalar: the expected squared distance from the whole sum.
    """
    return (size_N.double().square() * (probability_N.double().reciprocal() - 1.0)).sum()


def _bits(number: int) -> int:
    """Return the bits of a probability, few enough that ``number`` of them sum to an int64."""
    return min(_BITS, 62 - number.bit_length())


def _check(value_N: Tensor, num_kept: int) -> None:
    if value_N.dim() != 1:
        raise ValueError(f"value_N must have one dimension, got the shape {tuple(value_N.shape)}")
    if not 1 <= num_kept <= value_N.numel():
        raise ValueError(f"num_kept must be in [1, {value_N.numel()}], got {num_kept}")
