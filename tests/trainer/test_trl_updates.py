"""Prefixes of all micro-batches of a step in trl's trainers, which make batches, labels and losses themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.flop_counter import FlopCounterMode
from trl import DPOConfig, DPOTrainer, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer

import sparsebp_cli as sbp

from .conftest import distance, make_model
from .fused import Fused
from .test_trl import OPTIONS, PROMPT, grpo, make_tokenizer, reward, texts, train
from .test_trl_waste import all_right_or_wrong, same_logs

pytestmark = pytest.mark.filterwarnings("ignore")  # trl warns of its own defaults, and transformers of trl's
SMALL = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


def pairs(folder: Path, model: Any, **options: Any) -> Any:
    """Four pairs of answers to each prompt, of which a micro-batch has two pairs at random."""
    data = {"prompt": [text for text in texts(8, 2 * PROMPT, 1) for _ in range(4)]}
    data |= {"chosen": texts(32, 16, 2), "rejected": texts(32, 16, 3)}
    reference = make_model(max_position_embeddings=128)
    for parameter in reference.parameters():  # of two equal models the log compares numbers that only rounding makes
        parameter.data.mul_(1.1)
    return DPOTrainer(
        model,
        reference,
        DPOConfig(str(folder), **(OPTIONS | options | {"per_device_train_batch_size": 2})),
        train_dataset=Dataset.from_dict(data),
        processing_class=make_tokenizer(),
    )


def judged(folder: Path, model: Any, **options: Any) -> Any:
    """Four answers to each prompt, good or bad, of which a micro-batch has two."""
    data = {"prompt": [text for text in texts(8, 2 * PROMPT, 1) for _ in range(4)], "completion": texts(32, 16, 2)}
    return KTOTrainer(
        model,
        make_model(max_position_embeddings=128),
        KTOConfig(str(folder), **(OPTIONS | options | {"per_device_train_batch_size": 2})),
        train_dataset=Dataset.from_dict({**data, "label": [True, False] * 16}),
        processing_class=make_tokenizer(),
    )


def groups(folder: Path, model: Any, **options: Any) -> Any:
    """Groups of which some are all right or all wrong."""
    trainer = grpo(folder, model, **options)
    trainer.reward_funcs = [all_right_or_wrong]
    return trainer


def rloo(folder: Path, model: Any, **options: Any) -> Any:
    own = {"num_generations": 4, "max_completion_length": 8, "beta": 0.0}
    return RLOOTrainer(
        model,
        reward,
        RLOOConfig(str(folder), **(OPTIONS | own | options)),
        train_dataset=Dataset.from_dict({"prompt": texts(32, 2 * PROMPT, 1)}),
        processing_class=make_tokenizer(),
    )


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "DPO": (pairs, {"max_steps": 8}),
    "KTO": (judged, {"max_steps": 4}),
    "GRPO": (groups, {"max_steps": 8}),
    "GRPO, a generation twice in a step": (groups, {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}),
    "GRPO, a generation ends in a step, reference": (groups, {"steps_per_generation": 3, "beta": 0.1, "max_steps": 4}),
    "RLOO": (rloo, {"max_steps": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_prefixes_of_an_update_leave_losses_and_weights_of_trl_as_they_are(name: str, tmp_path: Path) -> None:
    make, options = CASES[name]
    own = SMALL | options
    if "ends in a step" in name:
        own["per_device_train_batch_size"] = 8  # of three batches, whole groups
    expected, log, _ = train(make, tmp_path / "plain", None, **own)
    found, logged, engine = train(make, tmp_path / "own", sbp.make_policy("lossless", prefixes="update"), **own)
    assert distance(expected, found) < 1e-5
    assert len(log) == len(logged) == own["max_steps"] + 1
    same_logs(log, logged)
    note = engine.notes["packing of updates"]
    assert "sharing prefixes skipped" in note
    assert "ran without shared prefixes" not in note


@pytest.mark.slow
def test_an_update_of_groups_costs_less_than_its_micro_batches(tmp_path: Path) -> None:
    costs = []
    for way in ("separate", "share", "update"):
        policy = sbp.make_policy("lossless", prefixes=way, verify="never")
        with FlopCounterMode(display=False) as counter:  # generation included, the same in all
            train(grpo, tmp_path / way, policy, **SMALL, max_steps=2, logging_strategy="no")
        costs.append(counter.get_total_flops())
    separate, share, update = costs
    assert update < 0.8 * share
    assert share < 0.9 * separate


class Mine(GRPOTrainer):
    """A loss of one's own may run other forwards."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return 2 * super()._compute_loss(model, inputs)


@pytest.mark.slow
def test_a_class_of_ones_own_shares_within_each_batch_and_says_so(tmp_path: Path) -> None:
    def make(folder: Path, model: Any, **options: Any) -> Any:
        trainer = grpo(folder, model, **options)
        trainer.__class__ = Mine
        return trainer

    _, _, engine = train(make, tmp_path, sbp.make_policy("lossless", prefixes="update"), **SMALL, max_steps=1)
    assert "pass the micro-batches of an update to engine.expect" in engine.notes["packing of updates"]


@pytest.mark.parametrize("added", [0.0, 0.1])
def test_announced_batches_are_cut_as_they_were_announced(added: float) -> None:
    """The first backward shows whether a loss adds a gradient to examples of weight zero."""
    made = Fused()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3)).chunk(4)
    batches = [{"input_ids": made.ids[rows], "labels": made.labels[rows], "fused_lm_head": True} for rows in order]
    weights = [made.weights[rows] for rows in order]
    for batch, weight in zip(batches, weights, strict=True):
        made.loss(made.model(**batch), weight + added).backward()
    wanted = made.grads(made.model)
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.0)
    with sbp.attach(made.model, sbp.make_policy("lossless", prefixes="update"), optimizer=optimizer) as engine:
        for _ in range(2):
            engine.expect([{**b, "example_weight": w} for b, w in zip(batches, weights, strict=True)])
            for batch, weight in zip(batches, weights, strict=True):
                engine.columns(example_weight=weight)
                engine.backward(made.loss(made.model(**batch), weight + added))
            optimizer.step()
            for one, other in zip(made.grads(made.model), wanted, strict=True):
                torch.testing.assert_close(one, other)
    assert "in 2 of 2 updates" in engine.notes["packing of updates"]
    assert ("the loss gives them a gradient" in engine.notes["packing"]) == bool(added)
