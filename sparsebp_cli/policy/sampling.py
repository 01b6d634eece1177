"""Random selections with chosen probabilities, of a fixed size: what most unbiased gradient estimators end with.

A policy scores its rows (or columns), :func:`water_fill` turns scores into inclusion probabilities that sum to the
number kept, :func:`draw` draws exactly that many, and what is kept is multiplied by 1 / its probability. The sum of
what is kept is then unbiased, and probabilities in proportion to the scores make its variance the smallest.

The probabilities are those of Ziteng Wang, Jianfei Chen and Jun Zhu, "Efficient Backpropagation with
Variance-Controlled Adaptive Sampling" (ICLR 2024), https://arxiv.org/abs/2402.17227. We differ: they draw each row
independently, so the number of rows is random and the host waits for it; we draw systematically in random order, W. G.
Madow, "On the Theory of Systematic Sampling, II" (Annals of Mathematical Statistics, 1949), which has the same
probabilities, nearly the same variance and a fixed number.

Sums are of integers, exact in any order, so the same generator always gives the same draw, on a GPU too. Nothing waits
for the device.

Shape letters: N rows (or whatever is drawn), K kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BITS = 40  # a probability is a multiple of 2^-40, unless there are more than 2^21 rows


def water_fill(score_N: Tensor, num_kept: int) -> Tensor:
    """Return inclusion probabilities ``min(1, c * score)``, with the ``c`` for which they sum to ``num_kept``.

    A score below about 1e-12 of the largest counts as that much, so that everything may be drawn and no weight is
    infinite. NaN counts as 0, infinity as the largest finite number.

    Args:
        score_N: Scores, at least 0, such as the product of the norms of the two rows that are multiplied.
        num_kept: Expected number that is drawn, in [1, N].

    Returns:
        float64, (N,), each in (0, 1], on the device of the scores.

    Raises:
        ValueError: ``score_N`` has more than one dimension, or ``num_kept`` is not in [1, N].
    """
    import torch

    _check(score_N, num_kept)
    number = score_N.numel()
    score_N = score_N.double().nan_to_num(0.0).clamp(min=0.0)
    largest = score_N.max().clamp(min=torch.finfo(torch.float64).tiny)
    grid = 1 << _bits(number)
    level_N = (score_N / largest * grid).long().clamp(min=1)
    sorted_N, order_N = level_N.sort(descending=True, stable=True)
    rest_N = level_N.sum() - sorted_N.cumsum(0) + sorted_N  # of this one and all smaller ones
    place_N = torch.arange(number, device=score_N.device)
    # The first is certain if its share of the expected number exceeds 1; then so is the second of what remains.
    num_certain = (sorted_N * (num_kept - place_N) > rest_N).sum()
    last = num_certain.clamp(max=number - 1)  # if all are certain, the number kept of the others is not used
    factor = (num_kept - num_certain) / rest_N.gather(0, last[None]).double()
    probability_N = torch.where(place_N < num_certain, 1.0, (sorted_N * factor).clamp(max=1.0))
    return torch.empty_like(probability_N).index_copy_(0, order_N, probability_N)


def draw(probability_N: Tensor, num_kept: int, generator: torch.Generator) -> Tensor:
    """Draw exactly ``num_kept`` different numbers, number ``n`` with probability ``probability_N[n]``.

    The numbers are put in random order, each on a segment as long as its probability; every whole number plus one
    common random offset then falls into another segment.

    Args:
        probability_N: Probability of each number, in (0, 1], summing to ``num_kept`` up to rounding, such as from
            :func:`water_fill`.
        num_kept: Number that is drawn, in [1, N].
        generator: ``step.generator(site, device)``, on the device of the probabilities.

    Returns:
        int64, (K,), in order.

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
    # Rounding leaves the sum a little off. The first numbers in random order get or give what is missing, none more
    # than one in all, so that no segment can be hit twice and the last point hits one.
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
        num_kept: Number that is drawn, in [1, N].
        generator: ``step.generator(site, device)``, on the device of the scores.

    Returns:
        What is drawn, int64, (K,), in order, and the weight of each, float32, (K,).
    """
    probability_N = water_fill(score_N, num_kept)
    index_K = draw(probability_N, num_kept, generator)
    return index_K, weigh(probability_N, index_K)


def draw_independently(probability_N: Tensor, generator: torch.Generator) -> Tensor:
    """Draw each number by itself, ``n`` with probability ``probability_N[n]``: how many is random, and may be none.

    The host waits for the count. Prefer :func:`draw`, except to reproduce a published method.

    Args:
        probability_N: Probability of each number, in [0, 1].
        generator: ``step.generator(site, device)``, on the device of the probabilities.

    Returns:
        int64, in order.
    """
    import torch

    uniform_N = torch.rand(probability_N.shape, dtype=torch.float64, generator=generator, device=probability_N.device)
    return (uniform_N < probability_N).nonzero().flatten()


def weigh(probability_N: Tensor, index_K: Tensor) -> Tensor:
    """Return 1 / the probability of each number drawn: the weight that makes a sum unbiased.

    Args:
        probability_N: Probabilities with which they were drawn, in (0, 1].
        index_K: Numbers that were drawn, int64.

    Returns:
        float32, (K,).
    """
    return probability_N.index_select(0, index_K).reciprocal().float()


def variance(size_N: Tensor, probability_N: Tensor) -> Tensor:
    """Return the variance of an independently drawn, weighted sum: the sum of ``size^2 * (1 / probability - 1)``.

    A draw of fixed size comes close to it; its own variance depends on pairs, and has to be measured.

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
        raise ValueError(f"expected one dimension, got the shape {tuple(value_N.shape)}")
    if not 1 <= num_kept <= value_N.numel():
        raise ValueError(f"num_kept must be in [1, {value_N.numel()}], got {num_kept}")
