"""Check that a part selector keeps its contract; each violation raises an ``AssertionError`` of one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from sparsebp_cli.backward import attach
from sparsebp_cli.policy import Observed, Stateful, Step
from sparsebp_cli.testing import check_repeatable, check_state, name_of, require
from sparsebp_shelf.part.extension import find_divisible, show_weights
from sparsebp_shelf.part.kind import PartSelector, TrainedWeight, WeightGradient
from sparsebp_shelf.part.weight_part import WeightPart

NUM_STEPS = 3
_SIZE = 256  # sides of a weight; blocks up to this size fit


class _Network(nn.Module):
    """Two MLPs with a gate, as in a decoder's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(_SIZE, _SIZE) for name in ("up_proj", "gate_proj", "down_proj")})
            for _ in range(2)
        )

    def forward(self, x_NS: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            x_NS = x_NS + layer["down_proj"](layer["up_proj"](x_NS) * layer["gate_proj"](x_NS).relu())
        return x_NS


def check_part_selector(policy: PartSelector) -> None:
    """Check a part selector against every promise of the contract, on a model of two gated MLPs. The linears are
    ``up_proj``, ``gate_proj`` and ``down_proj`` of ``layers.0`` and ``layers.1``, all 256 wide."""
    weights = _weights(policy)

    def show(seed: int) -> list[Observed]:
        generator = torch.Generator().manual_seed(seed)
        return [WeightGradient(w.name, torch.rand(w.matrix_OD.shape, generator=generator)) for w in weights]

    check_state(policy, weights, show)
    for check in _CHECKS:
        check(policy)


def _network(policy: PartSelector) -> _Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = _Network()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not (policy.of_frozen and name.endswith("weight")))
    return network


def _weights(policy: PartSelector) -> tuple[TrainedWeight, ...]:
    network = _network(policy)
    return show_weights(network, find_divisible(network, frozen=policy.of_frozen))


def _choose(policy: PartSelector, seed: int = 0) -> dict[str, WeightPart]:
    weights = _weights(policy)
    state = policy.init(weights) if isinstance(policy, Stateful) else {}
    return dict(policy.parts(weights, Step(0, seed=seed, num_steps=NUM_STEPS, state=state)))


def _numbers(parts: dict[str, WeightPart]) -> dict[str, tuple[type[WeightPart], list[int]]]:
    return {name: (type(part), part.index_K.tolist()) for name, part in parts.items()}


def _check_choice(policy: PartSelector) -> None:
    sizes = {weight.name: (weight.num_outputs, weight.num_inputs) for weight in _weights(policy)}
    parts = _choose(policy)
    require(bool(parts), f"{name_of(policy)}: chooses no part")
    for name, part in parts.items():
        require(name in sizes, f"{name_of(policy)}: {name!r} is no weight that it received")
        part.check(*sizes[name])
    check_repeatable(policy, lambda other: _numbers(_choose(other)))
    wrong = f"{name_of(policy)}: declares exact or unbiased, but weights outside of the parts are not trained"
    require(not policy.exact and not policy.unbiased, wrong)


def _train(policy: PartSelector, execution: Literal["fast", "reference"]) -> dict[str, Tensor]:
    """Train a few steps and return the weights."""
    network = _network(policy)
    batches = [torch.randn(5, _SIZE, generator=torch.Generator().manual_seed(number)) for number in range(8)]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with attach(network, policy, optimizer=optimizer, num_steps=NUM_STEPS, execution=execution) as engine:
        for _ in range(NUM_STEPS):
            if engine.trials_are_due():
                first, *others = [
                    lambda x=x: network(x).square().mean() for x in batches[: engine.count_trial_batches()]
                ]
                engine.run_trials(first, others=others)
            engine.backward(network(batches[0]).square().mean())
            optimizer.step()
    return {name: value.clone() for name, value in network.state_dict().items()}


def _check_training(policy: PartSelector) -> None:
    """Check that only parts change, and that the reference, which restricts dense gradients, trains equally."""
    before, fast, reference = _network(policy).state_dict(), _train(policy, "fast"), _train(policy, "reference")
    changed = [name for name, value in fast.items() if not torch.equal(value, before[name])]
    require(bool(changed), f"{name_of(policy)}: trains nothing")
    biases = any(name.endswith("bias") for name in changed)
    text = f"{name_of(policy)}: {'freezes' if policy.of_frozen else 'trains'} a bias, but must not"
    require(biases == policy.of_frozen, text)
    for name, value in fast.items():
        same = torch.allclose(value, reference[name], rtol=1e-4, atol=1e-6)
        require(same, f"{name_of(policy)}: {name} differs from the reference execution")


_CHECKS: tuple[Callable[[PartSelector], None], ...] = (_check_choice, _check_training)
