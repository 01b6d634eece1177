"""Variance-controlled sampling: the controller on recorded numbers, both draws by enumeration, and training."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import sparsebp_cli as sbp
from sparsebp_cli.backward import count_flops
from sparsebp_cli.errors import SparseBPError, UsageError
from sparsebp_cli.policy import Seen, Site, Step, choice
from sparsebp_cli.worker.activation_checkpoint import checkpoint_activations
from sparsebp_shelf import sampling
from sparsebp_shelf.layer_sampler import LayerOutput
from sparsebp_shelf.policies.variance_control import (
    EXAMPLES,
    ROWS,
    STRENGTH,
    adjust_rows,
    adjust_shares,
    adjust_strength,
    find_top_share,
    variance_of_rows,
)
from sparsebp_shelf.policies.vcas import VCAS

EXAMPLES_OF_BATCH, LENGTH = 8, 12
LOOSE = {"every": 2, "tolerance": 0.5, "row_tolerance": 0.5}


def make_model(layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).train()


def batches(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (EXAMPLES_OF_BATCH, LENGTH), generator=generator) for _ in range(12)]


def loss_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def train(model: LlamaForCausalLM, policy: dict[str, Any] | None, steps: int = 6, **options: Any) -> dict[str, float]:
    """Train, with trial passes where they are due; return the policy's state."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = sbp.attach(model, [] if policy is None else policy, optimizer=optimizer, **options)
    data = batches()
    for number in range(steps):
        one, other = data[2 * number], data[2 * number + 1]
        engine.run_trials(lambda: loss_of(model, one), others=[lambda: loss_of(model, other)])  # noqa: B023
        engine.backward(loss_of(model, one))
        optimizer.step()
        optimizer.zero_grad()
    state = {} if policy is None else dict(engine.states._states["0"])
    engine.detach()
    return {key: float(value) for key, value in state.items()}


@pytest.mark.parametrize(("strength", "share"), [(0.5, 2 / 4), (0.9, 3 / 4), (0.99, 1.0), (0.0, 1 / 4), (1.0, 1.0)])
def test_the_smallest_share_of_the_norms_is_that_of_the_published_function(strength, share) -> None:
    assert find_top_share(torch.tensor([4.0, 3.0, 2.0, 1.0]), strength) == share
    assert find_top_share(torch.tensor([1.0, 3.0, 4.0, 2.0]), strength) == share


def test_the_strength_rises_by_a_hundredth_a_round_while_too_much_is_added() -> None:
    strength = 0.0
    for number in range(1, 40):
        strength = adjust_strength(strength, added=0.03, between=1.0, tolerance=0.025)
        assert strength == pytest.approx(0.01 * number)
    assert adjust_strength(1.0, added=1.0, between=1.0, tolerance=0.025) == 1.0
    assert adjust_strength(0.5, added=0.02, between=1.0, tolerance=0.025) == 0.49
    assert adjust_strength(0.0, added=0.02, between=1.0, tolerance=0.025) == 0.0


def test_shares_of_examples_move_slowly_and_never_fall_from_a_layer_to_the_one_above() -> None:
    assert adjust_shares([1.0, 1.0, 1.0], [0.5, 0.75, 0.25]) == pytest.approx([0.8, 0.9, 0.9])
    assert adjust_shares([0.5], [1.0]) == pytest.approx([0.7])


def test_shares_of_rows_change_by_a_twentieth() -> None:
    assert adjust_rows(1.0, added=0.0, between=1.0, tolerance=0.025) == 0.95
    assert adjust_rows(0.5, added=0.03, between=1.0, tolerance=0.025) == pytest.approx(0.5 / 0.95)
    assert adjust_rows(0.99, added=1.0, between=1.0, tolerance=0.025) == 1.0
    assert adjust_rows(0.3, added=0.0, between=1.0, tolerance=0.0) == 1.0


def state_of(examples: float, rows: float) -> dict[str, float]:
    return {STRENGTH: 1.0, f"{EXAMPLES}0": examples, f"{EXAMPLES}1": 1.0, f"{ROWS}layer": rows}


def test_the_mean_of_the_examples_drawn_is_the_gradient() -> None:
    policy, output = VCAS(), LayerOutput(0, 2)
    norm_B = torch.tensor([5.0, 1.0, 0.5, 3.0, 0.1, 2.0])
    draws = [policy.sample(norm_B, output, Step(0, draw=draw, state=state_of(0.5, 1.0))) for draw in range(3000)]
    factor = torch.stack([draw for draw in draws if draw is not None]).double()
    assert len(factor) == 3000
    assert bool((factor.count_nonzero(1) == 3).all())
    error = (factor.mean(0) - 1).abs()
    assert bool((error <= 4 * factor.std(0) / 3000**0.5 + 1e-9).all())


def test_a_layer_with_as_many_examples_as_the_one_above_draws_none() -> None:
    policy, step = VCAS(), Step(0, state={f"{EXAMPLES}0": 0.5, f"{EXAMPLES}1": 0.5})
    assert policy.sample(torch.ones(6), LayerOutput(0, 2), step) is None
    assert policy.sample(torch.ones(6), LayerOutput(1, 2), step) is not None


def _see(seed: int) -> tuple[Seen, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 4, generator=generator).double()
    grad = torch.randn(6, 5, generator=generator).double() * torch.tensor([9.0, 1, 1, 2, 0.1, 0.5])[:, None]
    return Seen(grad, readings={"input_norm": choice.norm(x, 1)}), x, grad


def test_over_all_draws_of_six_rows_mean_and_variance_are_right() -> None:
    seen, x, grad = _see(0)
    policy, site = VCAS(), Site("layer", 5, (1, 6), 0)
    step = Step(0, state=state_of(1.0, 0.5))
    given: list[Tensor] = []

    def note(probability: Tensor, number: int, _: torch.Generator) -> Tensor:
        given.append(probability)
        return torch.arange(number)

    with patch.object(sampling, "draw", note):
        policy.choose(seen, site, step)
    # Of draws on their own with the same probabilities, the published form, every subset.
    mean, second = torch.zeros(5, 4).double(), 0.0
    truth = grad.t() @ x
    for kept in itertools.product((False, True), repeat=6):
        mask = torch.tensor(kept)
        chance = float(torch.where(mask, given[0], 1 - given[0]).prod())
        drawn = mask.nonzero().flatten()
        with patch.object(sampling, "draw", lambda *_: drawn):  # noqa: B023
            split = policy.choose(seen, site, step)
        assert split is not None
        assert split.wgrad is not None
        found = split.wgrad.apply(grad).t() @ x
        mean += chance * found
        second += chance * float((found - truth).square().sum())
    torch.testing.assert_close(mean, truth, rtol=1e-6, atol=1e-6)
    product = choice.norm(grad, 1) * choice.norm(x, 1)
    assert second == pytest.approx(float(sampling.variance(product, given[0])), rel=0.05)
    assert variance_of_rows(product, 0.5, lambda norm_N: norm_N) == pytest.approx(second, rel=0.05)


def test_rows_of_examples_that_were_left_out_are_skipped_in_both_products() -> None:
    seen, _, grad = _see(1)
    grad = grad.clone()
    grad[2:4] = 0.0  # the second of three examples
    site, step = Site("layer", 5, (3, 2), 0), Step(0, state=state_of(2 / 3, 1.0))
    split = VCAS().choose(Seen(grad, readings=seen.readings), site, step)
    assert split is not None
    for part in (split.dgrad, split.wgrad):
        assert part is not None
        assert part.index_K.tolist() == [0, 1, 4, 5]
        assert torch.equal(part.apply(grad), grad)
    assert split.full_bias


def test_without_tolerance_training_is_dense_bit_for_bit() -> None:
    exact, plain = make_model(), make_model()
    train(exact, {"name": "vcas", "tolerance": 0.0, "row_tolerance": 0.0, "every": 2})
    train(plain, None)
    assert all(torch.equal(a, b) for a, b in zip(exact.parameters(), plain.parameters(), strict=True))


def test_before_the_first_round_training_is_dense_bit_for_bit() -> None:
    controlled, plain = make_model(), make_model()
    train(controlled, {"name": "vcas", "every": 100})
    train(plain, None)
    assert all(torch.equal(a, b) for a, b in zip(controlled.parameters(), plain.parameters(), strict=True))


def test_fast_and_reference_train_alike_and_shares_fall_only_downwards() -> None:
    fast, reference = make_model(), make_model()
    state = train(fast, {"name": "vcas", **LOOSE}, 6)
    other = train(reference, {"name": "vcas", **LOOSE}, 6, execution="reference")
    assert state == pytest.approx(other)
    for one, two in zip(fast.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    shares = [state[f"{EXAMPLES}{layer}"] for layer in range(3)]
    assert shares == sorted(shares)
    assert state[STRENGTH] == pytest.approx(0.98)
    assert min(value for key, value in state.items() if key.startswith(ROWS)) < 1.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_decides_once(reentrant: bool) -> None:
    plain, checkpointed = make_model(), make_model()
    checkpoint_activations(checkpointed, use_reentrant=reentrant)
    one = train(plain, {"name": "vcas", **LOOSE}, 6)
    two = train(checkpointed, {"name": "vcas", **LOOSE}, 6)
    assert one == pytest.approx(two)
    for first, second in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


def test_executed_work_is_what_the_shares_claim() -> None:
    model, data = make_model(), batches()
    engine = sbp.attach(model, {"name": "vcas"}, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    policy = engine.decisions._scopes[0][0]
    values = engine.states.of(policy)
    engine.states._states["0"] = {
        key: 0.5 if key.startswith((EXAMPLES, ROWS)) and "lm_head" not in key else 1.0 for key in values
    }
    with count_flops() as dense, engine.disabled():
        loss_of(model, data[0]).backward()
    model.zero_grad()
    loss = loss_of(model, data[0])
    with count_flops() as backward:
        engine.backward(loss)
    claim = engine.claim()
    head = 2 * 2 * EXAMPLES_OF_BATCH * LENGTH * 32 * 64
    assert claim.claimed_flops - head == pytest.approx((claim.dense_flops - head) * (0.5 + 0.25) / 2)
    assert backward.total < dense.total


def test_a_round_needs_as_many_micro_batches_as_it_measures() -> None:
    model = make_model(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = sbp.attach(model, {"name": "vcas", "every": 1}, optimizer=optimizer)
    data = batches()
    engine.backward(loss_of(model, data[0]))
    optimizer.step()
    assert engine.count_trial_batches() == 2
    with pytest.raises(
        UsageError, match=r"needs 2 micro-batches for its trial passes, got 1: pass 1 of them as others in engine"
    ):
        engine.run_trials(lambda: loss_of(model, data[0]))
    with pytest.raises(UsageError, match=r"call engine\.run_trials"):
        engine.backward(loss_of(model, data[0]))


@pytest.mark.parametrize("other", [{"name": "dropbp", "keep": 0.5}, {"name": "gact"}, {"name": "lossless"}])
def test_other_policies_that_change_rows_or_inputs_are_refused_by_name(other) -> None:
    with pytest.raises(SparseBPError, match="chooses examples at the output of each layer"):
        sbp.attach(make_model(1), [{"name": "vcas"}, other], optimizer=torch.optim.SGD(make_model(1).parameters(), 0.1))


def test_the_control_draws_as_many_at_random() -> None:
    control = VCAS().control
    assert control is not None
    assert control["by"] == "uniform"
    assert VCAS(by="uniform").control is None
