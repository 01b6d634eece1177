"""What becomes of the optimizer's state when a layer's turn ends, and how layers of turns are drawn."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.errors import PolicyError
from sparsebp_cli.policy import Parameter, ParameterSelector, Step, make_policy

from .families import tiny_decoder

RATE = 0.01
BADAM = {
    "name": "frozen",
    "freeze": ["*embed_tokens*", "*norm.weight", "*lm_head*"],
    "turn": "layers",
    "order": "ascending",
    "every": 2,
    "optimizer_state": "drop",
}


def make(policy: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, sbp.Engine]:
    torch.manual_seed(0)
    model = tiny_decoder("llama", num_hidden_layers=4, tie_word_embeddings=False)
    optimizer = torch.optim.Adam(model.parameters(), RATE, eps=1e-20)
    return model, optimizer, sbp.attach(model, policy, optimizer=optimizer)


def train(model: nn.Module, engine: sbp.Engine, optimizer: torch.optim.Optimizer, index: int) -> None:
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(index))
    engine.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()


def layers_of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    return {name.split(".")[2] for name, p in model.named_parameters() if p in optimizer.state}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    return sum(value.numel() * value.element_size() for value in values)


def test_adam_holds_the_state_of_the_layer_in_turn_alone() -> None:
    model, optimizer, engine = make(BADAM)
    sizes = [
        sum(p.numel() for name, p in model.named_parameters() if f"layers.{layer}." in name and "norm" not in name)
        for layer in range(4)
    ]
    for index in range(8):
        train(model, engine, optimizer, index)
        if index % 2 == 0:  # in the middle of a turn
            assert layers_of_state(model, optimizer) == {str(index // 2)}
            assert state_bytes(optimizer) == 2 * 4 * sizes[index // 2]


def test_the_first_update_of_every_turn_is_the_rate_times_the_sign_of_the_gradient() -> None:
    model, optimizer, engine = make(BADAM)
    seen: list[dict[str, tuple[Tensor, Tensor]]] = []

    def note(*_: object) -> None:
        named = model.named_parameters()
        seen.append({name: (p.detach().clone(), p.grad.clone()) for name, p in named if p.grad is not None})

    optimizer.register_step_pre_hook(note)
    for index in range(10):  # the first layer's second turn begins with step 8
        train(model, engine, optimizer, index)
        if index % 2 == 0:
            after = dict(model.named_parameters())
            assert seen[index]
            for name, (before, grad) in seen[index].items():
                step = RATE * grad.sign()
                torch.testing.assert_close(before - after[name], step, rtol=0, atol=1e-6)


def test_without_dropping_every_layer_that_had_a_turn_has_state() -> None:
    model, optimizer, engine = make({**BADAM, "optimizer_state": "keep"})
    for index in range(8):
        train(model, engine, optimizer, index)
    assert layers_of_state(model, optimizer) == {"0", "1", "2", "3"}


@pytest.mark.parametrize("loads_first", [True, False], ids=["optimizer before attach", "optimizer after attach"])
@pytest.mark.parametrize("order", ["ascending", "random", "independent"])
def test_a_run_resumed_within_a_turn_goes_on_to_the_same_bits(order: str, loads_first: bool) -> None:
    policy = {**BADAM, "order": order}

    def run(stop: int | None) -> dict[str, Tensor]:
        model, optimizer, engine = make(policy)
        for index in range(9):
            if index == stop:
                weights, state, mine = model.state_dict(), optimizer.state_dict(), engine.state_dict()
                model = tiny_decoder("llama", num_hidden_layers=4, tie_word_embeddings=False)
                model.load_state_dict(weights)
                optimizer = torch.optim.Adam(model.parameters(), RATE, eps=1e-20)
                if loads_first:
                    optimizer.load_state_dict(state)
                engine = sbp.attach(model, policy, optimizer=optimizer)
                if not loads_first:
                    optimizer.load_state_dict(state)
                engine.load_state_dict(mine)
            train(model, engine, optimizer, index)
        return model.state_dict()

    expected, resumed = run(None), run(5)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_independent_draws_train_each_layer_in_its_share_of_the_turns() -> None:
    """LISA's gamma of L layers: each is trained in gamma / L of the turns, and none waits for the others."""
    policy = make_policy("frozen", turn="layers", order="independent", at_once=2, every=3)
    assert isinstance(policy, ParameterSelector)
    parameters = [Parameter(f"layers.{layer}.weight", layer, 4) for layer in range(8)]
    parameters += [Parameter("embed_tokens.weight", None, 4), Parameter("lm_head.weight", None, 4)]
    turns = [frozenset(policy.select(parameters, Step(3 * turn))) for turn in range(4000)]
    assert all(turns[turn] == frozenset(policy.select(parameters, Step(3 * turn + 2))) for turn in range(20))
    assert all(len(turn) == 4 and {"embed_tokens.weight", "lm_head.weight"} <= turn for turn in turns)
    counts = Counter(name for turn in turns for name in turn)
    for layer in range(8):  # five standard deviations of 4,000 draws at 1/4
        assert abs(counts[f"layers.{layer}.weight"] / 4000 - 2 / 8) < 5 * (0.25 * 0.75 / 4000) ** 0.5
    again = sum(len(one & other) - 2 for one, other in itertools.pairwise(turns)) / 3999
    assert abs(again - 2 * 2 / 8) < 0.06  # a permutation would repeat none within a round


def test_dropping_state_needs_turns() -> None:
    with pytest.raises(PolicyError, match="optimizer_state needs 'turn: layers'"):
        make_policy("frozen", freeze=["*norm*"], optimizer_state="drop")
