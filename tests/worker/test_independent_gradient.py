"""The gradient of a step held against that of other examples: by hand, and through runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparsebp_cli.backward import GradientComparison, attach
from sparsebp_cli.policy import make_policy
from sparsebp_cli.recipe.composition import find_unsupported
from sparsebp_cli.run import History
from sparsebp_cli.worker.batch import BatchOrder, micro_batch_loss
from sparsebp_cli.worker.data import IGNORED, EncodedExample
from sparsebp_cli.worker.independent_gradient import (
    IndependentBatches,
    IndependentComparison,
    examples_at_cost,
    measure_sgd_variance,
)
from sparsebp_cli.worker.trial_step import TrialStep
from tests.worker.conftest import LLAMA, work

CPU = torch.device("cpu")


def ragged_examples(number: int) -> list[EncodedExample]:
    """Of several lengths, the first tokens masked, so that a mean over batches is not one over targets."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(number):
        ids = random.integers(3, 60, int(random.integers(6, 20)))
        labels = ids.copy()
        labels[: int(random.integers(1, 5))] = IGNORED
        found.append(EncodedExample(ids, labels))
    return found


def by_hand(model: Any, examples: list[EncodedExample]) -> torch.Tensor:
    """The gradient of the mean loss over all targets of some examples, one example after the other."""
    model.zero_grad()
    total, targets = torch.zeros(()), 0
    for example in examples:
        ids = torch.from_numpy(example.input_ids)[None]
        logits = model(input_ids=ids).logits[0, :-1]
        wanted = torch.from_numpy(example.labels)[1:]
        total = total + torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
        targets += int((wanted != IGNORED).sum())
    (total / targets).backward()
    gradient = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return gradient


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(one @ other / one.norm() / other.norm())


@pytest.mark.parametrize("cost_ratio", [0.26, 0.5, 1.0, 1.3])
def test_both_cosines_are_those_of_gradients_taken_one_example_at_a_time(cost_ratio: float) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, vocab_size=64)).train()
    examples = ragged_examples(23)
    order = BatchOrder(examples, 4, seed=3, pad_token_id=0)
    engine = attach(model, [make_policy("topk", keep=0.5, along="rows")])
    batches = IndependentBatches(
        order, 2, 9, partial(lambda batch, targets: micro_batch_loss(model, batch, targets, CPU))
    )
    held = [order._example(position) for position in range(8, 12)]
    permutation = torch.randperm(23, generator=torch.Generator().manual_seed(3 * 1_000_003 + 2)).tolist()
    others = [number for number in permutation if number not in held][:9]
    first = partial(micro_batch_loss, model, *order.rank_part(2), CPU)
    with TrialStep(model, engine, first, torch.Tensor.backward) as trial:
        comparison = IndependentComparison(trial, batches)
        policy = trial.run("policy").gradients
        comparison.policy.add_draw(policy)
        size = comparison.add_dense(cost_ratio)
        found = comparison.policy.overall().cosine, comparison.dense_cosine
    engine.detach()
    assert size == {0.26: 2, 0.5: 2, 1.0: 4, 1.3: 4}[cost_ratio]
    large = by_hand(model, [examples[number] for number in others])
    parts = [held[start : start + size] for start in range(0, 4, size)]
    dense = [cosine(by_hand(model, [examples[number] for number in part]), large) for part in parts]
    assert found[1] == pytest.approx(sum(dense) / len(dense), abs=1e-5)
    ours = torch.cat([policy[name].flatten().double() for name, _ in model.named_parameters()])
    assert found[0] == pytest.approx(cosine(ours, large), abs=1e-5)


def test_the_variance_of_sgd_is_what_halves_of_a_batch_say() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, vocab_size=64)).train()
    examples = ragged_examples(23)
    order = BatchOrder(examples, 5, seed=3, pad_token_id=0)
    batches = IndependentBatches(order, 1, 0, lambda batch, targets: micro_batch_loss(model, batch, targets, CPU))
    held = [order._example(position) for position in range(5, 10)]
    engine = attach(model, [make_policy("topk", keep=0.5, along="rows")])
    with TrialStep(
        model, engine, partial(micro_batch_loss, model, *order.rank_part(1), CPU), torch.Tensor.backward
    ) as trial:
        dense = trial.run("dense").gradients
        found = measure_sgd_variance(trial, dense, batches)
    engine.detach()
    halves = [[examples[number] for number in held[start : start + 2]] for start in (0, 2)]  # the fifth is in neither
    one, other = (by_hand(model, half) for half in halves)
    counts = [sum(int((example.labels[1:] != IGNORED).sum()) for example in half) for half in halves]
    whole = torch.cat([dense[name].flatten().double() for name, _ in model.named_parameters()])
    per_target = (one - other).square().sum() / (1 / counts[0] + 1 / counts[1])
    assert found == pytest.approx(float(per_target / sum(counts) / whole.square().sum()), rel=1e-4)
    assert found > 0


def test_halves_of_one_pool_have_the_variance_of_the_pool() -> None:
    """A linear model: the gradient of an example is its input, so the variance over batches is known."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24_000, 6, generator=generator) + 1.0  # unit variance
    found = []
    for batch in inputs.split(8):
        gradient, one, other = batch.mean(0), batch[:4].mean(0), batch[4:].mean(0)
        halves = GradientComparison({"w": gradient}, num_draws=2)
        halves.add_draw({"w": one})
        halves.add_draw({"w": other})
        spread = halves.overall().variance
        assert spread is not None
        found.append(2.0 * spread * 4 * 4 / 8**2 * float(gradient.square().sum()))
    assert sum(found) / len(found) == pytest.approx(6 / 8, rel=0.05)


@pytest.mark.parametrize(
    ("policy", "size", "has_one"),
    [
        ({"name": "random", "keep": 0.5, "along": "rows", "weighted": True}, 4, True),
        ({"name": "topk", "keep": 0.5, "along": "rows"}, 4, True),
        ({"name": "topk", "keep": 1.0, "along": "rows"}, 4, False),
        ({"name": "dense"}, 4, False),
        ({"name": "topk", "keep": 0.5, "along": "rows"}, 1, False),
    ],
    ids=["random", "topk", "keep 1", "dense", "one example"],
)
def test_a_run_tells_its_error_over_the_noise_of_sgd(
    tiny_recipe: Any, prepared: Any, policy: Any, size: int, has_one: bool
) -> None:
    measure = {"probe_every": None, "fidelity_every": 2, "warmup_steps": 1}
    training = {"max_steps": 2, "per_device_train_batch_size": size}
    run = prepared(tiny_recipe(policy=[policy], measure=measure, training=training))
    assert work(run) == 0, run.log_file.read_text()
    history = History.load(run.path)
    assert ("fidelity/noise_ratio" in history.metrics) is has_one
    if has_one:
        error, variance, ratio = (
            history.last(f"fidelity/{name}") for name in ("relative_error", "sgd_variance", "noise_ratio")
        )
        assert ratio == pytest.approx(error**2 / variance)


def test_other_examples_are_none_of_the_micro_batch_and_leave_the_order_as_it_is() -> None:
    examples = [EncodedExample(np.full(8, number), np.full(8, number)) for number in range(10)]
    order, untouched = (BatchOrder(examples, 3, seed=1, pad_token_id=0) for _ in range(2))
    state = torch.get_rng_state()
    for number in range(8):
        held = set(order[number]["input_ids"][:, 0].tolist())
        drawn = [i for batch in order.other_batches(number, 5) for i in batch["input_ids"][:, 0].tolist()]
        assert len(drawn) == len(set(drawn)) == 5
        assert not held & set(drawn)
        assert torch.equal(order[number + 1]["input_ids"], untouched[number + 1]["input_ids"])
    assert len([1 for batch in order.other_batches(0, 100) for _ in batch["labels"]]) == 7  # all that there are
    assert torch.equal(torch.get_rng_state(), state)


def test_dense_gets_at_least_the_cost_of_the_policy() -> None:
    for batch_size in (1, 4, 16):
        for ratio in (0.01, 0.25, 0.461, 0.5, 0.999, 1.0, 1.2):
            size = examples_at_cost(ratio, batch_size)
            assert size / batch_size >= min(1.0, ratio) - 1e-9
            assert size == 1 or (size - 1) / batch_size < ratio


@pytest.mark.parametrize(
    ("policy", "cheaper"),
    [
        ({"name": "dense"}, False),
        ({"name": "tokens", "score": "random", "keep": 0.25, "mode": "detach"}, True),
        ({"name": "uniform", "keep": 0.25, "start": 0.0, "end": 1.0, "interrupt": 0}, True),
        ({"name": "random", "keep": 0.1, "along": "rows"}, True),
    ],
    ids=["dense", "tokens", "examples", "rows"],
)
def test_a_run_tells_both_for_every_kind_of_choice(tiny_recipe: Any, prepared: Any, policy: Any, cheaper: bool) -> None:
    measure = {"probe_every": None, "fidelity_every": 2, "warmup_steps": 1, "independent_examples": 12}
    training = {"max_steps": 2, "per_device_train_batch_size": 8}
    run = prepared(tiny_recipe(policy=[policy], measure=measure, training=training))
    assert work(run) == 0, run.log_file.read_text()
    history = History.load(run.path)
    ours, dense = (history.last(f"fidelity/{name}independent_cosine") for name in ("", "dense_"))
    assert -1 <= ours <= 1
    assert 0 < dense <= 1
    examples = history.last("fidelity/dense_independent_examples")
    assert 1 <= examples < 8 if cheaper else examples == 8
    if not cheaper:
        assert ours == pytest.approx(dense, abs=1e-6)


def test_other_examples_need_steps_at_which_fidelity_is_measured(tiny_recipe: Any) -> None:
    with pytest.raises(ValueError, match="independent_examples needs fidelity_every"):
        tiny_recipe(measure={"independent_examples": 8, "fidelity_every": None})


def test_other_examples_with_several_processes_are_refused_by_name(tiny_recipe: Any) -> None:
    measure = {"independent_examples": 8, "fidelity_every": 2}
    assert [*find_unsupported(tiny_recipe(measure=measure))] == []
    (found,) = find_unsupported(tiny_recipe(measure=measure, target={"processes": 2}))
    assert (found.key, found.text) == (
        "measure.independent_examples",
        "8 works in one process, got target.processes: 2",
    )
