"""FreezeOut, AutoFreeze and GRASS: which layers are trained at which step, and with which learning rate."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import ModuleTrace, count_flops
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policies.frozen import Frozen
from sparsebp_cli.policy import Observation, Parameter, Step, make_policy
from sparsebp_cli.testing.promise import equal
from sparsebp_shelf.policies.autofreeze import AutoFreeze
from sparsebp_shelf.policies.freezeout import FreezeOut
from sparsebp_shelf.policies.grass import Grass

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
NAMES = [place.name for place in PLACES]


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


def group_of(name: str) -> int:
    first, second, *_ = name.split(".")
    return {"embed": 0, "head": 4}[first] if first != "layers" else int(second) + 1


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, [0.8, 0.85, 0.9, 0.95, 1.0]),
        ({"start": 0.5}, [0.5, 0.625, 0.75, 0.875, 1.0]),
        ({"curve": "cubic"}, [0.512, 0.614125, 0.729, 0.857375, 1.0]),
        ({"start": 0.5, "scaled": True}, [0.5, 0.625, 0.75, 0.875, 1.0]),
    ],
)
def test_the_rates_of_freezeout_are_those_of_its_schedule(options: dict[str, Any], ends: list[float]) -> None:
    policy = FreezeOut(**options)
    for index in range(NUM_STEPS):
        step, now = Step(index, num_steps=NUM_STEPS), index / NUM_STEPS
        expected = [
            0.5 * (1.0 / end if "scaled" in options else 1.0) * (1.0 + math.cos(math.pi * now / end))
            if now < end
            else 0
            for end in ends
        ]
        rates = policy.rates(PLACES, step)
        assert [rates[name] for name in NAMES] == pytest.approx(expected, abs=1e-12)
        assert list(policy.select(PLACES, step)) == [n for n, end in zip(NAMES, ends, strict=True) if now < end]


def test_literal_rates_of_freezeout() -> None:
    policy = FreezeOut(start=0.8)
    rates = policy.rates(PLACES, Step(40, num_steps=100))  # half of the lowest layer's time
    assert rates["embed.weight"] == pytest.approx(0.5)
    assert rates["head.weight"] == pytest.approx(0.5 * (1 + math.cos(0.4 * math.pi)))
    scaled = FreezeOut(start=0.8, scaled=True).rates(PLACES, Step(0, num_steps=100))
    assert scaled["embed.weight"] == pytest.approx(1.25)
    assert scaled["head.weight"] == pytest.approx(1.0)
    assert FreezeOut(start=0.8).rates(PLACES, Step(0, num_steps=100)) == dict.fromkeys(NAMES, 1.0)


def test_freezeout_trains_what_a_loop_trains_that_has_a_group_for_each_parameter() -> None:
    policy = FreezeOut(start=0.3)
    model, optimizer, engine = make(policy)
    train(model, optimizer, engine)
    torch.manual_seed(0)
    other = Layered()
    names = [name for name, _ in other.named_parameters()]
    by_hand = torch.optim.AdamW([{"params": [p]} for p in other.parameters()], lr=RATE, weight_decay=0.1)
    ends = [0.3, 0.475, 0.65, 0.825, 1.0]
    for index in range(NUM_STEPS):
        loss_of(other, index).backward()
        for group, name in zip(by_hand.param_groups, names, strict=True):
            now, end = index / NUM_STEPS, ends[group_of(name)]
            group["lr"] = RATE * (0.5 * (1.0 + math.cos(math.pi * now / end)))
            if now >= end:
                group["params"][0].grad = None
        by_hand.step()
        by_hand.zero_grad()
    assert equal(weights(model), weights(other))
    assert len(optimizer.param_groups) == 1
    trained = {name for name, p in model.named_parameters() if p in optimizer.state}
    assert {name.split(".")[0] for name in trained} == {"head"}  # the others' memory is freed


def work_of(model: nn.Module, engine: Any) -> dict[str, int]:
    with ModuleTrace(model) as trace, count_flops(trace) as flops:
        engine.backward(loss_of(model, 0))
    return {f"layers.{n}.{m}": flops.backward.get(f"layers.{n}.{m}", 0) for n in range(3) for m in (0, 2)}


@pytest.mark.parametrize(("index", "frozen"), [(0, 0), (8, 1), (11, 2), (14, 3)])
def test_the_backward_of_freezeout_ends_above_what_is_frozen(index: int, frozen: int) -> None:
    """Groups end at steps 6, 9.5, 13 and 16.5 of 20: first the embeddings, then a layer each."""
    model, optimizer, engine = make(FreezeOut(start=0.3))
    train(model, optimizer, engine, last=index)
    executed = work_of(model, engine)
    product = 2 * 5 * 6 * 8
    for layer in range(3):
        for place in (0, 2):
            below = layer < frozen - 1  # group 0 is below the layers
            lowest = layer == max(0, frozen - 1) and place == 0 and frozen > 0  # nothing needs its inputs' gradient
            assert executed[f"layers.{layer}.{place}"] == (0 if below else product if lowest else 2 * product)


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


def test_the_draws_of_grass_are_in_proportion_to_the_mean_norms() -> None:
    policy = Grass(at_once=1, every=2)
    state = policy.init(PLACES)
    for index, sizes in enumerate([(1.0, 9.0, 9.0), (3.0, 9.0, 9.0)]):  # layer 0 alone has a turn
        seen = {"layers.0.weight": torch.tensor(sizes[0]), "embed.weight": torch.tensor(50.0)}
        state = policy.observe(state, Observation(norm=seen), Step(index))
    assert policy.weights(state["mean"], state["seen"]).tolist() == [2.0, 2.0, 2.0]
    for index in (2, 3):
        seen = {"layers.1.weight": torch.tensor(6.0)}
        state = policy.observe(state, Observation(norm=seen), Step(index))
    assert policy.weights(state["mean"], state["seen"]).tolist() == [2.0, 6.0, 4.0]
    draws = Counter(
        name
        for turn in range(4000)
        for name in policy.select(PLACES, Step(2 * turn, state=state))
        if name.startswith("layers")
    )
    for layer, share in enumerate((2 / 12, 6 / 12, 4 / 12)):  # five standard deviations
        assert abs(draws[f"layers.{layer}.weight"] / 4000 - share) < 5 * (share * (1 - share) / 4000) ** 0.5
    turn = [frozenset(policy.select(PLACES, Step(index, state=state))) for index in (6, 7)]
    assert turn[0] == turn[1]
    assert {"embed.weight", "head.weight"} < turn[0]


def test_the_control_of_grass_draws_what_lisa_draws() -> None:
    control = make_policy("grass", **{k: v for k, v in (Grass().control or {}).items() if k != "name"})
    lisa = Frozen(turn="layers", order="independent", at_once=2, every=20)
    assert isinstance(control, Grass)
    for index in range(0, 200, 10):
        step = Step(index, seed=3)
        assert set(control.select(PLACES, step)) == set(lisa.select(PLACES, step))
    assert control.control is None


RESUMED = [
    FreezeOut(start=0.3),
    FreezeOut(start=0.3, order="random"),
    AutoFreeze(every=2),
    AutoFreeze(every=2, by="random"),
    Grass(at_once=1, every=3),
    Grass(at_once=1, every=3, optimizer_state="drop"),
]


@pytest.mark.parametrize("stop", [3, 5, 11])
@pytest.mark.parametrize("policy", RESUMED, ids=repr)
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


def test_controls_freeze_as_many_in_another_order() -> None:
    control = make_policy("freezeout", **{k: v for k, v in (FreezeOut(start=0.3).control or {}).items() if k != "name"})
    assert isinstance(control, FreezeOut)
    step = Step(12, num_steps=NUM_STEPS)
    own, drawn = FreezeOut(start=0.3).ends(PLACES, step), control.ends(PLACES, step)
    assert sorted(own.values()) == sorted(drawn.values())
    assert own != drawn
    random = AutoFreeze(by="random")
    assert AutoFreeze().control == {"name": "autofreeze", "every": 100, "percentile": 50.0, "by": "random"}
    state = random.init(PLACES) | {"frozen": torch.tensor(2.0), "rank": torch.tensor([2.0, 0.0, 1.0])}
    assert random.select(PLACES, Step(3, state=state)) == ["embed.weight", "layers.0.weight", "head.weight"]


def test_what_cannot_work_is_refused_by_name() -> None:
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(PolicyError, match=r"attach\(\.\.\., num_steps=\.\.\.\)"):
        sbp.attach(model, "freezeout", optimizer=optimizer)
    for name in ("freezeout", "autofreeze", "grass"):
        with pytest.raises(PolicyError, match="freezes transformer layers by depth, but the model trains no parameter"):
            sbp.attach(nn.Linear(2, 2), name, optimizer=optimizer, num_steps=4)
        with pytest.raises(UnsupportedError, match="update='eager'"):
            sbp.attach(model, name, optimizer=optimizer, num_steps=4, update="eager")
