"""A small network, trained reproducibly with a policy or by plain PyTorch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from sparsebp_cli.backward import Engine, attach
from sparsebp_cli.policy import Policy


class Network(nn.Module):
    """Three linear layers with tanh between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 5)])

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., 5) of (..., 6)."""
        first, second, third = self.layers
        output: Tensor = third(second(first(x).tanh()).tanh())
        return output


def train_network(
    policy: Policy | None,
    *,
    num_steps: int = 3,
    stop: int | None = None,
    resume_with: Policy | None = None,
    dtype: torch.dtype = torch.float32,
    execution: Literal["fast", "reference"] = "fast",
    sites: Literal["linears", "branches", "nodes"] = "linears",
) -> list[Tensor]:
    """Train a small network with two backward passes a step, and return its weights. Without a policy this is plain
    PyTorch. Before step ``stop`` the engine is detached, and a new one with the policy ``resume_with`` (None: the same)
    continues from its state."""
    generator = torch.Generator().manual_seed(0)
    model = Network().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) / 3)
    data = torch.randn(num_steps, 2, 4, 3, 6, generator=generator, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    attached: Engine | None = None
    for step in range(num_steps):
        if policy is not None and step in (0, stop):
            chosen = policy if step == 0 or resume_with is None else resume_with
            state = None if attached is None else attached.state_dict()
            if attached is not None:
                attached.detach()
            attached = attach(model, [chosen], sites=sites, optimizer=optimizer, execution=execution)
            if state is not None:
                attached.load_state_dict(state)
        for x in data[step]:
            loss = model(x).square().mean()
            loss.backward() if attached is None else attached.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]
