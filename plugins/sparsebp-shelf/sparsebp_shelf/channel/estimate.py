"""Compute the norms of channels, from low-rank products or from the weights themselves.

Shape letters: N context rows, C channels of a group, G heads that share a channel, O outputs, D inputs, R rank.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from sparsebp_shelf.channel.group import Group, Member
from sparsebp_shelf.channel.kind import Estimate


class Estimator:
    """Estimates the outputs of frozen weights.

    Args:
        estimate: How to estimate; not ``none``.
        rank: R, at most the rank of each weight.
        groups: The groups whose scored weights are decomposed, once.
    """

    def __init__(self, estimate: Estimate, rank: int, groups: list[Group]) -> None:
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}
        for group in groups:
            for member in group.members:
                if member.is_scored and estimate == "svd":
                    self._factors[member.name] = _decompose(member.linear.weight.detach(), rank)

    def cost(self, member: Member) -> float:
        """Return the multiplications of the estimate for one row, as a fraction of those of the weight."""
        if not member.is_scored:
            return 0.0
        if member.name not in self._factors:
            return 1.0
        rank = len(self._factors[member.name][0])
        outputs, inputs = member.linear.weight.shape
        return rank * (inputs + outputs) / (inputs * outputs)

    @torch.no_grad()
    def score(self, group: Group, x_ND: Tensor) -> Tensor:
        """Return the norm of each channel of a group over rows of its block's input, (C,)."""
        is_mlp = group.about.part == "mlp"
        scored = [member for member in group.members if member.is_scored]
        output_NO = [self._outputs(member, x_ND, with_bias=is_mlp) for member in scored]
        if is_mlp:
            gate_NC, up_NC = output_NO
            hidden_NC = cast("Tensor", group.block.act_fn(gate_NC)) * up_NC
            norm_C: Tensor = hidden_NC.float().norm(dim=0)
            return norm_C
        score_C = output_NO[0].new_ones(group.about.num_channels, dtype=torch.float32)
        for member, output in zip(scored, output_NO, strict=True):
            score_C = score_C * output.float().norm(dim=0)[member.entry_CG.to(output.device)].mean(1)
        return score_C

    def _outputs(self, member: Member, x_ND: Tensor, *, with_bias: bool) -> Tensor:
        # Channels that are left out still get their bias. In an attention the bias says nothing about what they lose.
        # In an MLP it shifts the activation's input, so the score includes it.
        bias = member.linear.bias if with_bias else None
        if member.name not in self._factors:
            return nn.functional.linear(x_ND, member.linear.weight, bias)
        right_RD, left_OR = (factor.to(x_ND.device) for factor in self._factors[member.name])
        self._factors[member.name] = right_RD, left_OR
        return nn.functional.linear(nn.functional.linear(x_ND.to(right_RD), right_RD), left_OR, bias)


def _decompose(weight_OD: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return sqrt(S) V^T, (R, D), and U sqrt(S), (O, R), of the largest singular values, in the weight's dtype."""
    dtype = weight_OD.dtype
    left, values, right = torch.linalg.svd(weight_OD if dtype == torch.float64 else weight_OD.float(), False)
    root_R = values[:rank].sqrt()
    return (root_R[:, None] * right[:rank]).to(dtype), (left[:, :rank] * root_R).to(dtype)
