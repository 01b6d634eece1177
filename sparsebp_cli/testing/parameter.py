"""Conformance suite of parameter selectors. Each broken promise is an ``AssertionError`` of one sentence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsebp_cli.backward import attach
from sparsebp_cli.backward.kind.parameter.extension import find_parameters
from sparsebp_cli.policy import Parameter, ParameterSelector, Stateful, Step
from sparsebp_cli.testing.promise import equal, name_of, require
from sparsebp_cli.testing.state import check_state
from sparsebp_cli.testing.suite import check_repeatable

if TYPE_CHECKING:
    from sparsebp_cli.policy.contract import State

NUM_STEPS = 12


class _Decoder(nn.Module):
    """An embedding, four layers, a norm and a head, with the names that decoders use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm, self.lm_head = nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 7, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def check_parameter_selector(policy: ParameterSelector) -> None:
    """Check a parameter selector against every promise of the contract. The suite's model is a decoder of four layers,
    ``layers.0`` to ``layers.3``, with ``embed_tokens``, ``norm`` and ``lm_head``. Patterns among the policy's options
    must match these names."""
    check_state(policy, _parameters())
    _check_choice(policy)
    _check_repeatable(policy)
    _check_changes(policy)
    _check_exact(policy)
    _check_gradients(policy)


def _check_choice(policy: ParameterSelector) -> None:
    parameters = _parameters()
    names = {parameter.name for parameter in parameters}
    for index in range(NUM_STEPS):
        chosen = policy.select(parameters, _at(policy, index))
        good = isinstance(chosen, Collection) and not isinstance(chosen, str) and set(chosen) <= names
        require(good, f"{name_of(policy)}: select must return only names that it received, got {chosen!r}")
        require(len(chosen) > 0, f"{name_of(policy)}: trains nothing at step {index}")
        require(len(set(chosen)) == len(chosen), f"{name_of(policy)}: names a parameter twice at step {index}")


def _check_repeatable(policy: ParameterSelector) -> None:
    for index in range(NUM_STEPS):
        check_repeatable(policy, _choose, index)


def _check_changes(policy: ParameterSelector) -> None:
    sets = {_choose(policy, index) for index in range(NUM_STEPS)}
    text = f"{name_of(policy)}: declares that its choice never changes, but chose {len(sets)} sets in {NUM_STEPS} steps"
    require(policy.changes or len(sets) == 1, text)


def _check_exact(policy: ParameterSelector) -> None:
    names = frozenset(parameter.name for parameter in _parameters())
    whole = all(_choose(policy, index) == names for index in range(NUM_STEPS))
    require(not policy.exact or whole, f"{name_of(policy)}: declares exact, but does not train all parameters")
    require(policy.exact or not policy.unbiased, f"{name_of(policy)}: declares unbiased, so must declare exact")


def _check_gradients(policy: ParameterSelector) -> None:
    """Check that trained parameters have a gradient bit-identical to the dense one, and the others have none."""
    ((dense, _),) = _gradients(None, 1)
    for index, (gradients, state) in enumerate(_gradients(policy, NUM_STEPS)):
        chosen = frozenset(policy.select(_parameters(), replace(_at(policy, index), state=state)))
        for name, gradient in gradients.items():
            text = f"{name_of(policy)}: at step {index}, {name} must have a gradient exactly if select returned it"
            require((gradient is not None) == (name in chosen), text)
            if gradient is not None and index == 0:
                require(equal([gradient], [_given(dense[name])]), f"{name_of(policy)}: {name}.grad differs from dense")


@cache
def _parameters() -> tuple[Parameter, ...]:
    with torch.device("meta"):  # draws no weights, so the global generator stays unchanged
        return find_parameters(_Decoder())[0]


def _choose(policy: ParameterSelector, index: int) -> frozenset[str]:
    return frozenset(policy.select(_parameters(), _at(policy, index)))


def _at(policy: ParameterSelector, index: int) -> Step:
    """Return a step with the policy's first state, if it has a state."""
    state = policy.init(_parameters()) if isinstance(policy, Stateful) else {}
    return Step(index, num_steps=NUM_STEPS, state=state)


def _gradients(policy: ParameterSelector | None, num_steps: int) -> list[tuple[dict[str, Tensor | None], State]]:
    """Return the gradients of each step, and the policy's state before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, tokens_BT = _Decoder(), torch.randint(7, (2, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    policies = [] if policy is None else [policy]
    with attach(model, policies, optimizer=optimizer, num_steps=NUM_STEPS) as engine:
        for _ in range(num_steps):
            state = {} if policy is None else engine.states.of(policy)
            engine.backward(model(tokens_BT).logsumexp(-1).sum())
            gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
            found.append((gradients, state))
            optimizer.step()
            optimizer.zero_grad()
    return found


def _given(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient
