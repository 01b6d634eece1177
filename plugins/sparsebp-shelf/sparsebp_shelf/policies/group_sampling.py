"""Random selections of a fixed size in each group of places, for `mvue`.

Shape letters: G groups, M places of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BITS = 40  # a probability is a multiple of 2^-40


def fill_groups(score_GM: Tensor, num_kept: int) -> Tensor:
    """Return the probabilities of :func:`~sparsebp_shelf.sampling.water_fill` in every group separately.

    Args:
        score_GM: Scores, at least 0, one row a group.
        num_kept: Expected number of draws from each group, in [1, M].

    Returns:
        float64, (G, M), each in (0, 1]; every row sums to ``num_kept`` up to rounding.
    """
    import torch

    score_GM = score_GM.double().nan_to_num(torch.inf).nan_to_num().clamp(min=0.0)
    largest = score_GM.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    level_GM = (score_GM / largest * (1 << _BITS)).long().clamp(min=1)
    sorted_GM, order_GM = level_GM.sort(dim=-1, descending=True, stable=True)
    rest_GM = level_GM.sum(-1, keepdim=True) - sorted_GM.cumsum(-1) + sorted_GM
    place_M = torch.arange(score_GM.shape[-1], device=score_GM.device)
    num_certain = (sorted_GM * (num_kept - place_M) > rest_GM).sum(-1, keepdim=True)
    rest = rest_GM.gather(-1, num_certain.clamp(max=score_GM.shape[-1] - 1))
    probability_GM = (sorted_GM * ((num_kept - num_certain) / rest.double())).clamp(max=1.0)
    probability_GM = torch.where(place_M < num_certain, 1.0, probability_GM)
    return torch.empty_like(probability_GM).scatter_(-1, order_GM, probability_GM)


def draw_groups(probability_GM: Tensor, num_kept: int, generator: torch.Generator) -> Tensor:
    """Draw exactly ``num_kept`` different places of every group, as :func:`~sparsebp_shelf.sampling.draw` does.

    Args:
        probability_GM: Probability of each place, in (0, 1], every row summing to ``num_kept`` up to rounding, such as
            from :func:`fill_groups`.
        num_kept: Number of draws from each group, in [1, M].
        generator: ``step.generator(site, device)``, on the device of the probabilities.

    Returns:
        bool, (G, M), ``num_kept`` of each row true.
    """
    import torch

    device, one = probability_GM.device, 1 << _BITS
    order_GM = torch.rand(probability_GM.shape, generator=generator, device=device).argsort(-1)
    length_GM = (probability_GM.double().gather(-1, order_GM) * one).round().long().clamp(0, one)
    end_GM = length_GM.cumsum(-1)
    lacking_G = num_kept * one - end_GM[:, -1:]  # rounding error, which the first places absorb
    end_GM = end_GM + torch.minimum((one - length_GM).cumsum(-1), lacking_G.clamp(min=0))
    end_GM = end_GM - torch.minimum(length_GM.cumsum(-1), (-lacking_G).clamp(min=0))
    offset_G = torch.randint(one, (len(end_GM), 1), generator=generator, device=device)
    hit_GM = (end_GM - offset_G + (one - 1)).div(one, rounding_mode="floor")  # points before the end of each segment
    drawn_GM = hit_GM.diff(dim=-1, prepend=hit_GM.new_zeros(len(hit_GM), 1)) > 0
    return torch.empty_like(drawn_GM).scatter_(-1, order_GM, drawn_GM)
