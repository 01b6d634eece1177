"""A tiny model with trl's fused head, losses as its trainers make them, and what a draw of known probabilities is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from trl.trainer.utils import add_fused_lm_head

from .conftest import make_model


class Fused:
    """A model with trl's fused head, as GRPO calls it: groups of four answers, each to one prompt."""

    def __init__(self, groups: int = 4, answer: int = 8) -> None:
        self.model = make_model(max_position_embeddings=128).train()
        add_fused_lm_head(self.model, outputs=("log_probs", "entropy"))
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, 60, (groups, 24), generator=generator).repeat_interleave(4, 0)
        answers = torch.randint(3, 60, (4 * groups, answer), generator=generator)
        self.ids = torch.cat((prompts, answers), 1)
        self.labels = self.ids.masked_fill(torch.arange(24 + answer) < 24, -100)
        self.weights = torch.tensor([1.0, -1, 0.5, -0.5, *[0.0] * 4, -1, 1, 1, -1, *[0.0] * 4])[: 4 * groups]

    def run(self, model: nn.Module) -> Any:
        return model(input_ids=self.ids, labels=self.labels, fused_lm_head=True)

    def loss(self, output: Any, weights: Tensor) -> Tensor:
        return -(output.log_probs * weights[:, None]).sum() / 100

    def grads(self, model: nn.Module) -> list[Tensor]:
        found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found


def preference_loss(output: Any) -> Tensor:
    """DPO's: the logarithm of a sigmoid of sums over answers, of which the first half is chosen."""
    chosen, rejected = output.log_probs.sum(1).chunk(2)
    return -logsigmoid(0.1 * (chosen - rejected) + 0.3).mean()


def policy_loss(output: Any, weights: Tensor, beta: float = 0.05) -> Tensor:
    """GRPO's: clipped ratios to log-probabilities of before, and a divergence from a reference."""
    log_prob, known = output.log_probs, output.label_mask
    before = log_prob.detach() + 0.3 * torch.linspace(-1, 1, log_prob.numel()).view_as(log_prob)
    ratio = (log_prob - before).exp()
    best = torch.min(ratio * weights[:, None], ratio.clamp(0.8, 1.2) * weights[:, None])
    away = before - 0.2 - log_prob
    return ((-best + beta * (away.exp() - away - 1)) * known).sum() / known.sum()
