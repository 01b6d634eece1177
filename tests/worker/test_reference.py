"""A reference model: read once or batch by batch it says the same, what it cost is told, and a run is the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from sparsebp_cli.backward.kind.score.scorer import next_tokens
from sparsebp_cli.errors import DataError
from sparsebp_cli.policy import make_policy
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, home
from sparsebp_cli.worker.batch import collate
from sparsebp_cli.worker.data import build_data
from sparsebp_cli.worker.model import build_model, build_tokenizer
from sparsebp_cli.worker.reference import Reference, build_reference
from tests.worker.test_tokens import completion, pairs, run_of, values_of

__all__ = ["completion", "pairs"]  # fixtures


@pytest.fixture
def excess(tiny_folder: Path, tiny_recipe: Callable[..., Recipe]) -> dict[str, Any]:
    """A policy whose reference is a folder that transformers wrote."""
    folder = tiny_folder / "reference"
    section = tiny_recipe().model
    torch.manual_seed(11)
    build_model(section, build_tokenizer(section), None).save_pretrained(folder)
    return {"name": "tokens", "score": "excess", "keep": 0.5, "reference": str(folder)}


def build(recipe: Recipe) -> Reference:
    tokenizer = build_tokenizer(recipe.model)
    policies = [make_policy(entry.name, **entry.options) for entry in recipe.policy]
    data, told = build_data(recipe.dataset, tokenizer), list[str]()
    reference = build_reference(policies, recipe, data, tokenizer, Accelerator(cpu=True), told.append)
    made = reference.facts is not None and reference.facts.get("from_cache") is False
    assert [text.endswith("training examples once; scores are cached") for text in told] == [True] * made
    return reference


def cached() -> list[Path]:
    return sorted((home() / "cache" / "reference").glob("*"))


def test_the_scores_are_those_of_the_model_on_each_example_alone(completion, excess) -> None:
    recipe = completion(excess)
    reference = build(recipe)
    model = build_model(recipe.model.model_validate({"name": excess["reference"]}), build_tokenizer(recipe.model), None)
    model.eval()
    for example in reference.data.train[:7]:
        batch = collate([example], 0)
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, next_tokens(batch["labels"])[0], reduction="none")
        torch.testing.assert_close(torch.from_numpy(example.columns["reference_loss"]), loss, rtol=1e-4, atol=1e-4)
        assert loss.count_nonzero() > 0
    assert all(not example.columns for example in reference.data.held_out)


def test_scores_are_kept_by_data_and_weights_and_made_again_when_damaged(completion, excess) -> None:
    first = build(completion(excess))
    again = build(completion(excess | {"keep": 0.25}))
    facts = [reference.facts for reference in (first, again)]
    assert [fact["from_cache"] for fact in facts] == [False, True]
    assert facts[0]["flops"] == facts[1]["flops"] > 0, "what it cost is told also where it was not paid again"
    assert facts[0]["seconds"] == facts[1]["seconds"] > 0.0
    (kept,) = cached()
    kept.write_bytes(kept.read_bytes()[:100])
    assert build(completion(excess)).facts["from_cache"] is False
    for one, other in zip(first.data.train, again.data.train, strict=True):
        assert np.array_equal(one.columns["reference_loss"], other.columns["reference_loss"])
    recipe = completion(excess)
    fewer = recipe.model_copy(update={"dataset": recipe.dataset.model_copy(update={"max_examples": 30})})
    assert build(fewer).facts["from_cache"] is False
    assert len(cached()) == 2


def test_without_a_reference_nothing_is_done(completion) -> None:
    reference = build(completion({"name": "tokens", "score": "loss", "keep": 0.5}))
    assert (reference.attached, reference.facts, reference.columns) == (None, None, frozenset())
    assert cached() == []


def test_a_reference_that_is_not_there_is_told(completion, excess) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        build(completion(excess | {"reference": "./nowhere/at/all"}))


def test_a_run_on_the_other_part_of_the_data_is_the_reference_of_rho(completion, pairs, prepared) -> None:
    lines = pairs.read_text().splitlines()
    for name, part in (("mine", lines[:40]), ("other", lines[40:])):
        pairs.with_name(f"{name}.jsonl").write_text("\n".join(part), encoding="utf-8")

    def train(part: str, *policy: dict[str, Any]) -> Any:
        dataset = {"name": str(pairs.with_name(f"{part}.jsonl")), "format": "completion", "max_seq_length": 32}
        return run_of(completion(*policy, dataset=dataset, training={"max_steps": 3, "seed": 3}), prepared)

    rho = {"name": "rho", "keep": 0.5, "reference": str(train("other").path / "model")}
    runs = [train("mine", rho | {"reference_scores": way}) for way in ("cached", "fly")]
    assert values_of(runs[0], "train/loss") == pytest.approx(values_of(runs[1], "train/loss"), rel=1e-6)
    facts = [History.load(run.path).facts["reference"] for run in runs]
    assert facts[0]["digest"] == facts[1]["digest"]
    assert facts[0]["flops"] > 0
    assert all(0.0 < share < 1.0 for share in values_of(runs[0], "policy/trained_share"))
    assert values_of(runs[0], "train/loss") != values_of(train("mine"), "train/loss")


def test_cached_and_fly_train_the_same_and_both_tell_their_cost(completion, excess, prepared) -> None:
    runs = [run_of(completion(excess | {"reference_scores": way}), prepared) for way in ("cached", "fly")]
    assert values_of(runs[0], "train/loss") == pytest.approx(values_of(runs[1], "train/loss"), rel=1e-6)
    facts = [History.load(run.path).facts["reference"] for run in runs]
    assert [fact["scores"] for fact in facts] == ["cached", "fly"]
    assert facts[0]["digest"] == facts[1]["digest"]
    assert len({History.load(run.path).facts["dataset_digest"] for run in runs}) == 1  # the scores are no data
    assert facts[0]["flops"] > 0
    assert values_of(runs[0], "policy/trained_share") == pytest.approx([0.5] * 8, abs=0.05)
