"""Helpers of the conformance suites of all kinds of policies."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import ceil, log, log1p
from typing import Any, Literal, TypeVar

import torch
from pydantic_core import from_json
from torch import Tensor, nn

from sparsebp_cli.backward import Engine, attach
from sparsebp_cli.policy import Policy, Step
from sparsebp_cli.policy.option import validate_options

Kind = TypeVar("Kind", bound=Policy)
RARE = 1e-6  # probability that a suite refuses a policy that keeps its promise about draws


def require(condition: bool, text: str) -> None:
    """Raise ``AssertionError`` with a text unless a condition holds."""
    if not condition:
        raise AssertionError(text)


def enough(share: float) -> int:
    """Return how many draws show an outcome of a given probability almost surely."""
    return 1 if share >= 1.0 else ceil(log(RARE) / log1p(-share))


def name_of(policy: Policy) -> str:
    """Return a policy's class and options as a constructor call."""
    return f"{type(policy).__name__}({', '.join(f'{k}={v!r}' for k, v in policy)})"


def through_json(policy: Kind) -> Kind:
    """Return a policy after conversion to JSON and back, as a plan transfers it."""
    return validate_options(type(policy), from_json(policy.model_dump_json()))


def vary(step: Step, part: str, numbers: Iterable[int]) -> list[Step]:
    """Return copies of a step, each with another number in the field ``part``."""
    changes: list[dict[str, Any]] = [{part: number} for number in numbers]
    return [replace(step, **change) for change in changes]


def random_states() -> tuple[object, ...]:
    """Return the states of the global random generators."""
    import numpy as np

    return torch.get_rng_state().tolist(), repr(np.random.get_state(legacy=False)), random.getstate()


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether two lists of tensors are bit-identical."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


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


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.square().mean()


def train_network(
    policy: Policy | None,
    *,
    num_steps: int = 3,
    stop: int | None = None,
    resume_with: Policy | None = None,
    dtype: torch.dtype = torch.float32,
    execution: Literal["fast", "reference"] = "fast",
    sites: Literal["linears", "nodes"] = "linears",
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
        if attached is not None and attached.trials_are_due():
            batches = [data[step][number % 2] for number in range(attached.count_trial_batches())]
            first, *others = [partial(_loss, model, x) for x in batches]
            attached.run_trials(first, others=others)
        for x in data[step]:
            loss = model(x).square().mean()
            loss.backward() if attached is None else attached.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]
