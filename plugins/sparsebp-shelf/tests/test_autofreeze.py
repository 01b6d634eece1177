"""AutoFreeze: which layers are trained at which step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import Parameter, Step
from sparsebp_cli.testing.promise import equal
from sparsebp_shelf.policies.autofreeze import AutoFreeze

NUM_STEPS, RATE = 20, 0.01


class Layered(nn.Module):
    """Embeddings, three layers and a head: five groups by depth."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3))
        self.head = nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


PLACES = [
    Parameter("embed.weight", None, 4),
    *(Parameter(f"layers.{layer}.weight", layer, 4) for layer in range(3)),
    Parameter("head.weight", None, 4),
]


def make(policy: Any, num_steps: int = NUM_STEPS) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Layered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    return model, optimizer, sbp.attach(model, policy, optimizer=optimizer, num_steps=num_steps)


def train(
    model: nn.Module, optimizer: Any, engine: Any, first: int = 0, last: int = NUM_STEPS
) -> list[dict[str, float]]:
    """Train; return the norms of each step's gradients by name."""
    norms = []
    for index in range(first, last):
        engine.backward(loss_of(model, index))
        norms.append({n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return norms


def loss_of(model: nn.Module, index: int) -> Tensor:
    ids = torch.randint(7, (5,), generator=torch.Generator().manual_seed(index))
    return nn.functional.cross_entropy(model(ids), (ids + 1) % 7)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def expected_frozen(norms: list[dict[str, float]], every: int) -> list[int]:
    """Return how many layers are frozen at each step, from the definition."""
    found, frozen, before = [], 0, None
    total = [0.0] * 3
    for index, step in enumerate(norms):
        found.append(frozen)
        for layer in range(3):
            total[layer] += math.sqrt(sum(v**2 for n, v in step.items() if n.startswith(f"layers.{layer}.")))
        if (index + 1) % every == 0:
            if before is not None:
                changes = [abs(b - t) / b for b, t in list(zip(before, total, strict=True))[frozen:]]
                limit = sorted(changes)[(len(changes) - 1) // 2] if len(changes) % 2 else sum(sorted(changes)[:2]) / 2
                while frozen < 2 and changes and changes[0] < limit:
                    frozen, changes = frozen + 1, changes[1:]
            before, total = total, [0.0] * 3
    return found


@pytest.mark.parametrize("every", [1, 2, 3])
def test_autofreeze_freezes_the_longest_prefix_of_small_change(every: int) -> None:
    model, optimizer, engine = make(AutoFreeze(every=every))
    norms = train(model, optimizer, engine)
    found = [3 - len({n.split(".")[1] for n in step if "layers" in n}) for step in norms]
    assert found == expected_frozen(norms, every)
    assert found[-1] > 0
    for step, count in zip(norms, found, strict=True):
        assert ("embed.weight" in step) == (count == 0)
        assert {n.split(".")[1] for n in step if "layers" in n} == {str(n) for n in range(count, 3)}


@pytest.mark.parametrize(
    ("before", "after", "frozen", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], [1.1, 1.2, 1.3, 1.4], 0, 2),  # changes .1 .2 .3 .4, median .25
        ([1.0, 1.0, 1.0, 1.0], [1.3, 1.1, 1.2, 1.4], 0, 0),  # the lowest is above it
        ([2.0, 1.0, 1.0, 1.0], [1.0, 1.1, 1.2, 1.3], 1, 2),  # of the trained: .1 .2 .3, median .2, strictly below
        ([1.0, 1.0, 1.0, 1.0], [9.0, 9.0, 9.0, 1.0], 3, 3),  # one layer is left, and stays
        ([0.0, 1.0, 1.0, 1.0], [0.0, 1.1, 1.2, 1.3], 0, 0),  # without any gradient nothing is known
    ],
)
def test_literal_counts_of_autofreeze(before: list[float], after: list[float], frozen: int, expected: int) -> None:
    count = AutoFreeze().count_frozen(torch.tensor(before), torch.tensor(after), torch.tensor(float(frozen)))
    assert float(count) == expected


def test_a_percentile_of_zero_trains_as_dense_bit_for_bit() -> None:
    found = []
    for policy in (AutoFreeze(percentile=0.0), "dense"):
        model, optimizer, engine = make(policy)
        train(model, optimizer, engine)
        found.append(weights(model))
    assert equal(*found)


@pytest.mark.parametrize("stop", [3, 5, 11])
@pytest.mark.parametrize("policy", [AutoFreeze(every=2), AutoFreeze(every=2, by="random")], ids=repr)
def test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit(policy: Any, stop: int) -> None:
    model, optimizer, engine = make(policy)
    train(model, optimizer, engine)
    other, again, before = make(policy)
    train(other, again, before, last=stop)
    kept = before.state_dict()
    before.detach()
    with sbp.attach(other, policy, optimizer=again, num_steps=NUM_STEPS) as after:
        after.load_state_dict(kept)
        train(other, again, after, first=stop)
    assert equal(weights(model), weights(other))


def test_the_control_freezes_as_many_in_another_order() -> None:
    random = AutoFreeze(by="random")
    assert AutoFreeze().control == {"name": "autofreeze", "every": 100, "percentile": 50.0, "by": "random"}
    state = random.init(PLACES) | {"frozen": torch.tensor(2.0), "rank": torch.tensor([2.0, 0.0, 1.0])}
    assert random.select(PLACES, Step(3, state=state)) == ["embed.weight", "layers.0.weight", "head.weight"]


def test_what_cannot_work_is_refused_by_name() -> None:
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(PolicyError, match="freezes transformer layers by depth, but the model trains no parameter"):
        sbp.attach(nn.Linear(2, 2), "autofreeze", optimizer=optimizer)
    with pytest.raises(UnsupportedError, match="update='eager'"):
        sbp.attach(model, "autofreeze", optimizer=optimizer, update="eager")
