"""GradES: a matrix whose gradient is small is frozen for good; everything else has its dense gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import ModuleTrace, count_flops
from sparsebp_cli.errors import PolicyError, UnsupportedError
from sparsebp_cli.policy import Observation, Parameter, Step, make_policy
from sparsebp_cli.testing.promise import equal
from sparsebp_shelf.policies.grades import GradES

NUM_STEPS = 8
GRACE = 0.25  # two steps


class Layered(nn.Module):
    """Two layers of two matrices with biases, and a head; the second matrix of a layer has small gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


MATRICES = [f"layers.{layer}.{place}.weight" for layer in range(2) for place in (0, 2)]


def make(policy: Any, **options: Any) -> tuple[Layered, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Layered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return model, optimizer, sbp.attach(model, policy, optimizer=optimizer, num_steps=NUM_STEPS, **options)


def batch(index: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * index + micro)
    return torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator)


def train(model: Layered, optimizer: Any, engine: Any, first: int = 0, last: int = NUM_STEPS) -> list[dict[str, float]]:
    """Train with two micro-batches and clipping; return the sums of each step's gradients, as clipped."""
    sums = []
    for index in range(first, last):
        for micro in range(2):
            x, target = batch(index, micro)
            loss = nn.functional.cross_entropy(model(x), target)
            loss.backward() if engine is None else engine.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        sums.append({n: float(p.grad.abs().sum()) for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return sums


def expected_frozen(sums: list[dict[str, float]], threshold: float, *, relative: bool) -> list[set[str]]:
    """Return what is frozen at each step, from the definition."""
    found, frozen, first = [], set[str](), int(GRACE * NUM_STEPS)
    for index, sizes in enumerate(sums):
        found.append(set(frozen))
        if index >= first:
            limit = {name: threshold * (sums[first][name] if relative else 1.0) for name in MATRICES}
            frozen |= {name for name in MATRICES if name in sizes and sizes[name] < limit[name]}
    return found


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_threshold_of_zero_trains_as_dense_bit_for_bit() -> None:
    model, optimizer, engine = make(GradES(threshold=0.0))
    train(model, optimizer, engine)
    torch.manual_seed(0)
    dense = Layered()
    train(dense, torch.optim.AdamW(dense.parameters(), lr=0.01, weight_decay=0.1), None)
    assert equal(weights(model), weights(dense))


@pytest.mark.parametrize(("threshold", "relative"), [(0.9, False), (0.6, False), (0.9, True)])
def test_a_matrix_is_frozen_for_good_once_the_gradient_that_it_got_is_small(threshold: float, relative: bool) -> None:
    policy = GradES(threshold=threshold, relative=relative, grace=GRACE)
    model, optimizer, engine = make(policy)
    sums = train(model, optimizer, engine)
    found = [set(MATRICES) - sizes.keys() for sizes in sums]
    assert found == expected_frozen(sums, threshold, relative=relative)
    assert found[2] == set()
    assert set() < found[-1]
    assert all(earlier <= later for earlier, later in itertools.pairwise(found))
    first, *notes = [note for note in engine.report().notes if "trainable tensors" in note]
    assert first.startswith("10 of 10 ")
    assert first.endswith("are trained at first")
    changes = [index for index in range(1, NUM_STEPS) if found[index] != found[index - 1]]
    assert [note.split()[-2] for note in notes] == [str(index + 1) for index in changes]
    assert notes[-1].startswith(f"{10 - len(found[changes[-1]])} of 10 ")
    names = dict(model.named_parameters())
    assert all(names[name] not in optimizer.state for name in found[-1])  # its memory is freed
    assert all(parameter in optimizer.state for name, parameter in names.items() if name not in found[-1])


def test_all_matrices_frozen_skip_every_weight_gradient_of_the_layers() -> None:
    model, optimizer, engine = make(GradES(threshold=1e9, grace=GRACE))
    x, target = batch(0)
    counts = []
    for index in (0, 3):
        train(model, optimizer, engine, first=0 if index == 0 else index - 3, last=index)
        with ModuleTrace(model) as trace, count_flops(trace) as flops:
            loss = nn.functional.cross_entropy(model(x), target)
            engine.backward(loss)
        counts.append(
            {name: flops.backward.get(name.removesuffix(".weight"), 0) for name in [*MATRICES, "head.weight"]}
        )
    whole, frozen = counts
    product = {name: 2 * 5 * dict(model.named_parameters())[name].numel() for name in whole}
    left = {name: whole[name] - product[name] for name in MATRICES}
    assert {name: frozen[name] for name in MATRICES} == left
    assert frozen["head.weight"] == whole["head.weight"]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("by", ["gradient", "random"])
def test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit(stop: int, by: Any) -> None:
    policy = GradES(threshold=0.9, grace=GRACE, by=by)
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


def test_the_control_freezes_as_many_at_random_and_never_thaws_one() -> None:
    chosen = GradES(threshold=0.3, grace=0.0)
    assert chosen.control == {"name": "grades", "threshold": 0.3, "relative": False, "grace": 0.0, "by": "random"}
    control = make_policy("grades", **{key: value for key, value in chosen.control.items() if key != "name"})
    assert control.control is None
    places = [Parameter(f"layers.{n}.weight", n, 4, shape=(2, 2)) for n in range(6)]
    kept: dict[str, set[str]] = {}
    for policy in (chosen, control):
        state, frozen = policy.init(places), list[set[str]]()
        for index in range(5):
            seen = {place.name: torch.tensor(0.1 if n <= index else 1.0) for n, place in enumerate(places)}
            state = policy.observe(state, Observation(size=seen), Step(index, num_steps=5))
            trained = policy.select(places, Step(index + 1, num_steps=5, state=state))
            frozen.append({place.name for place in places} - set(trained))
        assert [len(names) for names in frozen] == [1, 2, 3, 4, 5]
        assert all(earlier < later for earlier, later in itertools.pairwise(frozen))
        kept[policy.by] = frozen[2]
    assert kept["gradient"] != kept["random"]


def test_what_cannot_work_is_refused_by_name() -> None:
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(PolicyError, match=r"attach\(\.\.\., num_steps=\.\.\.\)"):
        sbp.attach(model, GradES(threshold=1.0), optimizer=optimizer)
    with pytest.raises(PolicyError, match="weight matrices of transformer layers, but the model trains no such matrix"):
        sbp.attach(nn.Linear(2, 2), GradES(threshold=1.0, grace=0.0), optimizer=optimizer)
    with pytest.raises(UnsupportedError, match="GradES observes gradients of parameters, which update='eager' frees"):
        sbp.attach(model, GradES(threshold=1.0), optimizer=optimizer, num_steps=4, update="eager")
    with pytest.raises(UnsupportedError, match=r"needs attach\(optimizer=\.\.\.\)"):
        sbp.attach(model, GradES(threshold=1.0), num_steps=4)


def test_a_state_that_begins_after_the_grace_measures_against_its_own_first_step() -> None:
    policy = GradES(threshold=0.5, relative=True, grace=0.25)
    places = [Parameter("layers.0.weight", 0, 4, shape=(2, 2))]
    state = policy.init(places)
    for index, size in ((6, 4.0), (7, 3.0), (8, 1.0)):
        seen = Observation(size={"layers.0.weight": torch.tensor(size)})
        state = policy.observe(state, seen, Step(index, num_steps=NUM_STEPS))
        assert bool(state["small"]) == (index == 8)
