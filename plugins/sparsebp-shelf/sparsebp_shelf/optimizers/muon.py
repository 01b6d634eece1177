"""Run Muon on a model's hidden matrices and AdamW on all other parameters, as Muon's authors use it.

Keller Jordan and others: Muon, an optimizer for hidden layers in neural networks, 2024,
https://kellerjordan.github.io/posts/muon/: embeddings, heads, biases and norms get AdamW. Both optimizers are PyTorch's
own. They share one learning rate, because ``match_rms_adamw`` scales Muon's update to the size of AdamW's (Jingyuan Liu
and others: Muon is Scalable for LLM Training, 2025, https://arxiv.org/abs/2502.16982).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sparsebp_cli.optimizers import evaluate, keep_precision, refuse_complex


class MuonAdamW(torch.optim.Optimizer):
    """Run Muon on the matrices of hidden layers, AdamW on all other parameters.

    Args:
        model: The model whose parameters are trained, or plain parameters. Parameters of an ``nn.Embedding``, and a
            transformers model's parameters outside its base model (the head), are not hidden. Among plain parameters
            every matrix counts as hidden.
        lr: Learning rate of Muon and AdamW, 0 or more.
        weight_decay: Decay of Muon and AdamW, decoupled from the gradient; 0 or more.
        momentum: Momentum of Muon, 0 or more.
        nesterov: Whether Muon uses Nesterov momentum.
        ns_steps: Newton-Schulz steps, 1 to 99.
        betas: Decay rates of AdamW's moments, in [0, 1).
        eps: Smallest norm by which Muon divides a gradient; in AdamW added to the root of the second moment.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Tensor],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        hidden, others = _split(model)
        refuse_complex([*hidden, *others], "muon")
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "eps": eps}
        orthogonal: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        # A dummy parameter: PyTorch optimizers validate their arguments only when they get one.
        self._adamw = torch.optim.AdamW([torch.zeros(1)], betas=betas, **shared)
        self._muon = torch.optim.Muon([torch.zeros(1, 1)], adjust_lr_fn="match_rms_adamw", **shared, **orthogonal)
        groups = [
            {"params": params, "is_hidden": is_hidden, **inner.defaults}
            for params, is_hidden, inner in ((others, False, self._adamw), (hidden, True, self._muon))
            if params
        ]
        super().__init__(groups, {**self._muon.defaults, **self._adamw.defaults})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: PyTorch's, and both inner optimizers."""
        return {**super().__getstate__(), "_adamw": self._adamw, "_muon": self._muon}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in the precision in which it was saved."""
        super().load_state_dict(state_dict)
        keep_precision(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, and return the closure's result."""
        loss = evaluate(closure)
        for group in self.param_groups:
            inner: Any = self._muon if group["is_hidden"] else self._adamw
            inner.param_groups, inner.state = [group], self.state
            inner.step()
        return loss


def _split(model: nn.Module | Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the trained matrices of hidden layers, and all other trained parameters."""
    if isinstance(model, nn.Module):
        apart = {id(parameter) for parameter in _find_apart(model)}
        trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    else:
        apart, trained = set(), list(model)
    hidden = [p for p in trained if p.ndim == 2 and id(p) not in apart]
    known = {id(p) for p in hidden}
    return hidden, [p for p in trained if id(p) not in known]


def _find_apart(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of embeddings, and of heads outside a transformers model's base."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield from module.parameters()
        if isinstance(module, PreTrainedModel) and (base := module.base_model) is not module:
            inside = {id(parameter) for parameter in base.parameters()}
            yield from (parameter for parameter in module.parameters() if id(parameter) not in inside)
