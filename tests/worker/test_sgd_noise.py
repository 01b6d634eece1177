"""The variance of the dense gradient over batches: by hand, and through runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparsebp_cli.backward import GradientComparison, attach
from sparsebp_cli.policy import make_policy
from sparsebp_cli.run import History
from sparsebp_cli.worker.batch import BatchOrder, micro_batch_loss
from sparsebp_cli.worker.data import IGNORED, EncodedExample
from sparsebp_cli.worker.sgd_noise import halve, measure_sgd_variance
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


def test_the_variance_of_sgd_is_what_halves_of_a_batch_say() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA, vocab_size=64)).train()
    examples = ragged_examples(23)
    order = BatchOrder(examples, 5, seed=3, pad_token_id=0)
    split = halve(order[1], lambda batch, targets: micro_batch_loss(model, batch, targets, CPU))
    held = [order._example(position) for position in range(5, 10)]
    engine = attach(model, [make_policy("topk", keep=0.5, along="rows")])
    with TrialStep(
        model, engine, partial(micro_batch_loss, model, *order.rank_part(1), CPU), torch.Tensor.backward
    ) as trial:
        dense = trial.run("dense").gradients
        found = measure_sgd_variance(trial, dense, split)
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
