"""Bits that are shared out by sensitivity: the allocation, what trial passes measure, and training with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops
from sparsebp_cli.policy import Observation, Site, Step, TrialPass, make_policies
from sparsebp_cli.policy.composition import PolicyFacts
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from sparsebp_shelf.policies.bit_sharing import find_sensitivity, share_bits
from sparsebp_shelf.policies.gact import GACT
from sparsebp_shelf.policies.saved_codes import SavedCodes
from tests.backward.conftest import tiny_model
from tests.saver import saving_by_hand

BATCH = torch.randint(3, 64, (3, 12), generator=torch.Generator().manual_seed(0))
POLICY = {"name": "gact", "bits": 2, "group": 16, "adapt_interval": 2}


def loss_of(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=BATCH, labels=BATCH, use_cache=False).loss
    return loss


def attach(model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return sbp.attach(model, POLICY, optimizer=optimizer), optimizer


def train(model: Any, engine: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.run_trials(lambda: loss_of(model))
        engine.backward(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()


def shown(engine: Any) -> tuple[GACT, Step]:
    (policy,) = engine.states._policies.values()
    return policy, engine.states.show(policy, engine.now())


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def _variance(sensitivities: Sequence[float], bits: Sequence[int]) -> float:
    return sum(value * 4.0 ** (1 - number) for value, number in zip(sensitivities, bits, strict=True))


@pytest.mark.parametrize(
    ("sensitivities", "entries", "mean", "bits"),
    [
        ([1000.0, 1.0, 1.0], [8.0, 8.0, 8.0], 2.0, [4, 1, 1]),  # from 2 to 4 gains 234 / 2 a bit, the others 0.75
        ([16.0, 1.0], [8.0, 8.0], 2.0, [2, 2]),  # from 2 to 4 takes two bits, and one is left
        ([16.0, 16.0], [8.0, 64.0], 2.0, [8, 1]),  # a bit of the larger input takes eight times as much
        ([3.0, 1.0, 2.0], [8.0, 8.0, 8.0], 8.0, [8, 8, 8]),
        ([0.0, 0.0, 0.0], [8.0, 8.0, 8.0], 4.0, [4, 4, 4]),  # nothing is known: all alike
        ([5.0], [8.0], 1.0, [1]),
        ([], [], 4.0, []),
    ],
)
def test_bits_go_where_a_further_one_takes_most_from_the_variance(
    sensitivities: list[float], entries: list[float], mean: float, bits: list[int]
) -> None:
    assert share_bits(sensitivities, entries, mean) == bits


def test_no_other_bits_of_the_same_mean_have_much_less_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        sensitivities = torch.rand(4, generator=generator).pow(8).tolist()
        bits = share_bits(sensitivities, [1.0] * 4, 2.0)
        allowed = [other for other in product((1, 2, 4, 8), repeat=4) if sum(other) <= 8]
        assert tuple(bits) in allowed
        assert _variance(sensitivities, bits) <= _variance(sensitivities, [2] * 4) + 1e-12
        assert _variance(sensitivities, bits) <= 1.3 * min(_variance(sensitivities, other) for other in allowed)


@pytest.mark.parametrize("mean", [1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 8.0])
def test_any_mean_is_shared_out_nearly_as_well_as_the_best_of_all_choices(mean: float) -> None:
    """Of three inputs of different sizes, against all 64 choices: greedy is the best in nine of ten cases."""
    generator, worst, num_best = torch.Generator().manual_seed(0), 1.0, 0
    entries = [8.0, 24.0, 16.0]
    for _ in range(50):
        sensitivities = torch.rand(3, generator=generator).pow(8).tolist()
        bits = share_bits(sensitivities, entries, mean)
        allowed = [
            other
            for other in product((1, 2, 4, 8), repeat=3)
            if sum(number * size for number, size in zip(other, entries, strict=True)) <= mean * sum(entries)
        ]
        assert tuple(bits) in allowed
        best = min(_variance(sensitivities, other) for other in allowed)
        worst = max(worst, _variance(sensitivities, bits) / best)
        num_best += _variance(sensitivities, bits) <= best * (1 + 1e-9)
        same = max(number for number in (1, 2, 4, 8) if number <= mean)
        assert _variance(sensitivities, bits) <= _variance(sensitivities, [same] * 3) + 1e-12
    assert worst <= 1.4
    assert num_best >= 45


def test_the_sensitivity_is_the_larger_one_of_both_estimates() -> None:
    one, other, fine = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0]), torch.tensor([1.0, 1.0])
    assert find_sensitivity(one, other, fine) == max(9.0 + 16.0, 2 * (9.0 + 9.0))
    assert find_sensitivity(one, other, (one + other) / 2) == 25.0


def test_one_pass_measures_all_inputs_as_passes_with_one_coarse_input_each_do() -> None:
    model = tiny_model("llama")
    engine, _ = attach(model)
    names, seen = list(shown(engine)[1].state), list[Observation]()
    coarse = [dict.fromkeys(names, 1.0), *(dict.fromkeys(names, 8.0) | {name: 1.0} for name in names)]
    passes = [TrialPass(0, 1, state) for state in coarse]

    def note(_: GACT, state: Any, observations: Sequence[Observation], step: Step) -> Any:
        seen.extend(observations)
        return state

    with patch.object(GACT, "wants_trials", lambda *_: passes), patch.object(GACT, "observe_trials", note):
        engine.run_trials(lambda: loss_of(model))
    together, *alone = seen
    assert [name for name in together["gradient"] if ".0." in name] == [
        f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    ]
    for name, observation in zip(names, alone, strict=True):
        if name in together["gradient"]:
            assert torch.equal(observation["gradient"][name], together["gradient"][name])
            others = set(together["gradient"]) - {name}
            assert not any(torch.equal(observation["gradient"][other], together["gradient"][other]) for other in others)


def test_a_round_takes_three_passes_and_keeps_as_many_bytes_as_its_bits_say() -> None:
    model = tiny_model("llama")
    engine, _ = attach(model)
    with count_flops() as dense, engine.disabled():
        loss_of(model).backward()
    model.zero_grad()
    with count_flops() as trials:
        engine.run_trials(lambda: loss_of(model))
    assert trials.total == 3 * dense.total
    policy, step = shown(engine)
    kept: dict[str, tuple[Site, SavedCodes]] = {}

    def note(_: GACT, x_ND: Tensor, site: Site, step: Step) -> SavedCodes:
        found = SavedCodes.of(x_ND, int(step.state[site.name]), 16, step.generator(site, x_ND.device))
        kept[site.name] = site, found
        return found

    with patch.object(GACT, "save", note):
        loss_of(model)
    assert len({saved.bits for _, saved in kept.values()}) > 1
    sizes = {name: saved.shape[0] * saved.shape[1] for name, (_, saved) in kept.items()}
    used = sum(saved.bits * sizes[name] for name, (_, saved) in kept.items())
    assert 0.9 * 2 * sum(sizes.values()) < used <= 2 * sum(sizes.values())
    for site, saved in kept.values():
        assert saved.num_bytes == policy.count_bytes_at(site, step, *saved.shape, 4)


def test_the_gradient_is_that_of_inputs_restored_from_the_shared_bits() -> None:
    model, by_hand = tiny_model("llama"), tiny_model("llama")
    engine, _ = attach(model)
    engine.run_trials(lambda: loss_of(model))
    policy, step = shown(engine)
    engine.backward(loss_of(model))
    with saving_by_hand(by_hand, policy, step):
        loss_of(by_hand).backward()
    for own, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_measures_and_decides_as_without(reentrant: bool) -> None:
    plain, checkpointed = tiny_model("llama"), tiny_model("llama")
    checkpoint_activations(checkpointed, use_reentrant=reentrant)
    found = []
    for model in (plain, checkpointed):
        engine, optimizer = attach(model)
        train(model, engine, optimizer, 3)
        found.append(shown(engine)[1].state)
    assert found[0] == found[1]
    assert same(plain, checkpointed)


def test_a_resumed_run_has_the_same_bits_without_measuring_again() -> None:
    straight, resumed = tiny_model("llama"), tiny_model("llama")
    engine, optimizer = attach(straight)
    train(straight, engine, optimizer, 4)
    first, optimizer = attach(resumed)
    train(resumed, first, optimizer, 3)
    state = first.state_dict()
    first.detach()
    second, optimizer = attach(resumed)
    assert len(set(shown(second)[1].state.values())) == 1
    second.load_state_dict(state)
    assert not second.trials_are_due()
    assert len(set(shown(second)[1].state.values())) > 1
    train(resumed, second, optimizer, 1)
    assert same(straight, resumed)


def test_the_control_has_the_most_equal_bits_within_the_mean() -> None:
    for mean, same in ((1.5, 1), (2, 2), (3, 2), (5.5, 4)):
        control = GACT(bits=mean, adapt_interval=10).control
        assert control is not None
        assert list(make_policies(control)) == [GACT(bits=same)]


def test_bits_that_are_no_mean_or_no_bits_of_one_input_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"bits is a mean and must be in \[1, 8\], got 32"):
        GACT(bits=32, adapt_interval=10)
    with pytest.raises(ValidationError, match="without adapt_interval, bits must be 1, 2, 4, 8 or 32, got 3"):
        GACT(bits=3)
    with pytest.raises(ValidationError, match="less than or equal to 8"):
        GACT(bits=9, adapt_interval=10)


def test_only_bits_that_are_shared_out_need_one_process() -> None:
    assert PolicyFacts.of(GACT(bits=2, adapt_interval=10)).facts["observes"]
    assert not PolicyFacts.of(GACT(bits=2)).facts["observes"]
