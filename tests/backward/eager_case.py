"""Models that share weights in all ways, and a training that is plain PyTorch or eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsebp_cli.backward import attach
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from tests.backward.conftest import tiny_model, tokens

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


class Llama(nn.Module):
    def __init__(self, family: str = "llama", **options: Any) -> None:
        super().__init__()
        self.inner = tiny_model(family, **options)

    def forward(self, step: int) -> Tensor:
        batch = tokens(step)
        return self.inner(input_ids=batch, labels=batch).loss


class Recurrent(nn.Module):
    """A stack that shares all its weights: one cell, eight times."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head, self.reentrant = nn.Linear(16, 16), nn.Linear(16, 4), reentrant

    def forward(self, step: int) -> Tensor:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        for _ in range(8):
            x = self.run(lambda y: torch.tanh(self.cell(y)), x)
        return self.head(x).square().mean()

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x) if self.reentrant is None else checkpoint(function, x, use_reentrant=self.reentrant)


class Branches(Recurrent):
    """A layer that two branches share, at another depth in each."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__(reentrant)
        self.more, self.other, self.another = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, step: int) -> Tensor:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        first = self.run(lambda y: torch.tanh(self.more(torch.tanh(self.cell(y)))), x)
        second = self.run(lambda y: self.another(torch.tanh(self.cell(torch.tanh(self.other(y))))), x)
        return self.head(first + second).square().mean()


def checkpointed(model: Llama, reentrant: bool) -> Llama:
    checkpoint_activations(model.inner, use_reentrant=reentrant)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": Llama,
    "llama-tied": lambda: Llama(tie_word_embeddings=True),
    "gpt2-tied": lambda: Llama("gpt2"),
    "recurrent": Recurrent,
    "branches": Branches,
    "llama-checkpointed": lambda: checkpointed(Llama(tie_word_embeddings=True), False),
    "recurrent-checkpointed": lambda: Recurrent(False),
    "branches-checkpointed": lambda: Branches(False),
    "gpt2-checkpointed": lambda: checkpointed(Llama("gpt2"), False),  # with dropout
    "gpt2-reentrant": lambda: checkpointed(Llama("gpt2"), True),
    "llama-reentrant": lambda: checkpointed(Llama(tie_word_embeddings=True), True),
    "recurrent-reentrant": lambda: Recurrent(True),
    "branches-reentrant": lambda: Branches(True),
}


def train(
    make: Callable[[], nn.Module],
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["adamw"],
    *,
    steps: int = 12,
    accumulation: int = 1,
    eager: bool,
    max_norm: float | None = None,
    policies: Any = (),
    **options: Any,
) -> tuple[dict[str, Tensor], Any]:
    """Train with a schedule; deferred is plain PyTorch where there is no policy."""
    torch.set_num_threads(1)
    model = make().train()
    torch.manual_seed(1)  # of dropout
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    if eager:
        options |= {"update": "eager", "max_grad_norm": max_norm, "eager_clip": "exact" if max_norm else None}
    engine = attach(model, list(policies), optimizer=optimizer, **options) if eager or policies else None
    for step in range(steps):
        for micro in range(accumulation):
            loss = model(step * accumulation + micro) / accumulation
            if engine is None:
                loss.backward()
            else:
                engine.backward(loss, is_last=micro == accumulation - 1)
        if eager:
            assert all(p.grad is None for p in model.parameters())
        elif max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()} | _state(optimizer), engine


def _state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{n}.{k}": v.clone() for n, values in state.items() for k, v in values.items() if isinstance(v, Tensor)}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
