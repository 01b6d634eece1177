"""DropBP by sensitivity: trial passes measure how much each block matters, and rates follow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError, UsageError
from sparsebp_cli.policy import Observation, Step
from sparsebp_cli.testing import check_policy
from sparsebp_cli.testing.promise import equal
from sparsebp_shelf.block import DropBP, ResidualBlock
from sparsebp_shelf.block.dropbp import share_out
from sparsebp_shelf.block.layout import find_blocks
from tests.backward.conftest import tiny_model, tokens

NUM_STEPS, AT = 6, 2
SENSITIVE = DropBP(keep=0.5, sensitivity_at=AT / NUM_STEPS)


def make(policy: Any = SENSITIVE, **options: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    model = tiny_model("llama", num_hidden_layers=2, attention_dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(7)
    given = {"seed": 3, "num_steps": NUM_STEPS} | options
    return model, optimizer, sbp.attach(model, policy, optimizer=optimizer, **given)


def loss_of(model: nn.Module, index: int, micro: int = 0) -> Callable[[], Tensor]:
    ids = tokens(10 * index + micro)
    return lambda: model(input_ids=ids, labels=ids).loss


def train(model: nn.Module, optimizer: Any, engine: Any, first: int = 0, last: int = NUM_STEPS) -> None:
    for index in range(first, last):
        engine.run_trials(loss_of(model, index))
        for micro in range(2):
            engine.backward(loss_of(model, index, micro)())
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("sensitivity_J", "work_J", "keep", "tenths"),
    [
        ([1, 2, 4, 8], [100, 200, 100, 200], 0.5, [9, 8, 3, 1]),
        ([1, 1, 1, 1], [100, 100, 100, 100], 0.5, [5, 5, 5, 5]),
        ([0, 0, 0], [1, 2, 1], 0.1, [9, 9, 9]),
        ([5, 5], [1, 1], 1.0, [0, 0]),
    ],
)
def test_rates_are_shared_out_as_published(sensitivity_J: Any, work_J: Any, keep: float, tenths: Any) -> None:
    assert share_out(sensitivity_J, work_J, keep) == tenths


@pytest.mark.model
def test_the_sensitivity_of_a_block_is_the_change_of_the_norms_when_it_is_detached() -> None:
    model, optimizer, engine = make()
    train(model, optimizer, engine, last=AT)
    blocks, _ = find_blocks(model, "the reference")
    state = torch.get_rng_state()

    def norms(dropped: str) -> dict[str, Tensor]:
        torch.set_rng_state(state)
        hooks = [model.get_submodule(name).register_forward_hook(_detach) for name in [dropped] if name]
        with engine.disabled():
            grads = torch.autograd.grad(loss_of(model, AT)(), list(model.parameters()), allow_unused=True)
        for hook in hooks:
            hook.remove()
        names = [name for name, _ in model.named_parameters()]
        return {n: torch.zeros(()) if g is None else g.norm() for n, g in zip(names, grads, strict=True)}

    whole = norms("")
    expected = {b.name: sum(float((whole[n] - g) ** 2) for n, g in norms(b.name).items()) for b in blocks}
    torch.set_rng_state(state)
    engine.run_trials(loss_of(model, AT))
    found = engine.states.of(SENSITIVE)
    assert list(found) == sorted(block.name for block in blocks)
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(found.values())) == len(blocks)


def _detach(module: nn.Module, args: object, output: Any) -> Any:
    return (output[0].detach(), *output[1:]) if isinstance(output, tuple) else output.detach()


@pytest.mark.model
def test_trial_passes_leave_gradients_generators_and_weights_alone_and_are_made_once() -> None:
    model, optimizer, engine = make()
    train(model, optimizer, engine, last=AT)
    first = next(model.parameters())
    first.grad = kept = torch.ones_like(first)
    before, states, calls = weights(model), (torch.get_rng_state().tolist(), random.getstate()), 0

    def forward() -> Tensor:
        nonlocal calls
        calls += 1
        random.random()
        return loss_of(model, AT)()

    assert engine.trials_are_due()
    engine.run_trials(forward)
    assert calls == 1 + 4  # two blocks in each of two layers
    assert first.grad is kept
    assert all(p.grad is None for p in list(model.parameters())[1:])
    assert (torch.get_rng_state().tolist(), random.getstate()) == states
    assert equal(weights(model), before)
    assert not engine.trials_are_due()
    engine.run_trials(forward)
    assert calls == 5


@pytest.mark.model
@pytest.mark.parametrize("stop", range(1, NUM_STEPS))
def test_a_resumed_training_is_the_uninterrupted_one_bit_for_bit(stop: int) -> None:
    model, optimizer, engine = make()
    train(model, optimizer, engine)
    other, again, before = make()
    train(other, again, before, last=stop)
    kept = before.state_dict()
    before.detach()
    with sbp.attach(other, SENSITIVE, optimizer=again, seed=3, num_steps=NUM_STEPS) as after:
        after.load_state_dict(kept)
        train(other, again, after, first=stop)
    assert equal(weights(model), weights(other))


def test_blocks_are_dropped_at_their_rates_and_the_work_is_the_share() -> None:
    blocks = [ResidualBlock(f"b{n}", n, "mlp", size) for n, size in enumerate((100, 200, 100, 200))]
    state = {f"b{n}": float(size) for n, size in enumerate((1, 2, 4, 8))}
    count, work, numbers = dict.fromkeys(state, 0), 0, set()
    for index in range(4000):
        dropped = SENSITIVE.drop(blocks, Step(index, num_steps=4000, state=state))
        numbers.add(len(dropped))
        for block in blocks:
            count[block.name] += block.name in dropped
            work += block.num_weights * (block.name not in dropped)
    assert numbers == {2, 3}  # 2.1 on average
    assert [count[f"b{n}"] / 4000 for n in range(4)] == pytest.approx([0.9, 0.8, 0.3, 0.1], abs=0.03)
    assert work / 4000 / 600 == pytest.approx(0.5, abs=0.01)


@pytest.mark.model
def test_parameters_are_measured_in_trial_passes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    saw: list[Observation] = []
    plain = DropBP.observe
    monkeypatch.setattr(DropBP, "observe", lambda self, *given: [saw.append(given[1]), plain(self, *given)][1])
    train(*make())
    assert len(saw) == NUM_STEPS
    assert not any(observation["norm"] for observation in saw)


@pytest.mark.model
def test_what_cannot_work_is_refused_by_name() -> None:
    model, optimizer, engine = make()
    train(model, optimizer, engine, last=AT)
    with pytest.raises(UsageError, match=r"needs trial passes before step 2: call engine.run_trials\(forward\)"):
        engine.backward(loss_of(model, AT)())
    engine.detach()
    with pytest.raises(PolicyError, match=r"attach\(\.\.\., num_steps=\.\.\.\)"):
        sbp.attach(model, SENSITIVE, optimizer=optimizer).backward(loss_of(model, 0)())
    for keep in (0.05, 1.0):
        with pytest.raises(PolicyError, match="with sensitivity_at, keep must be in"):
            sbp.make_policy("dropbp", keep=keep, sensitivity_at=0.1)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.75])
@pytest.mark.parametrize("at", [0.0, 0.3])
def test_it_keeps_every_promise(keep: float, at: float) -> None:
    check_policy("dropbp", keep=keep, sensitivity_at=at)
    assert DropBP(keep=keep, sensitivity_at=at).control == {"name": "dropbp", "keep": keep}
