"""Runs that choose tokens or examples: their data, loss and cost, and that they are resumed to the last bit."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sparsebp_cli.errors import DataError
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.worker.batch import BatchOrder, collate
from sparsebp_cli.worker.data import Data, build_data
from sparsebp_cli.worker.model import build_model, build_tokenizer
from tests.worker.conftest import start, work

TEXTS = ["the quick brown fox", "jumps over", "the lazy dog", "a", "fox and dog and fox", "the quick dog jumps"]
TRAINING = {"max_steps": 8, "gradient_accumulation_steps": 2, "seed": 3}
ALWAYS = {"start": 0.0, "end": 1.0, "interrupt": 0}
METRICS_OF_SCORES = ("flops/scoring", "proof/excess_share", "proof/executed_share")


@pytest.fixture
def pairs(tiny_folder: Path) -> Path:
    """Completions whose last word is marked, and prompts whose first letter is."""
    path = tiny_folder / "pairs.jsonl"
    rows = []
    for number in range(60):
        prompt, completion = f"Line {number % 11}:", f" {TEXTS[number % len(TEXTS)]}"
        start = len(prompt) + completion.rfind(" ") + 1
        rows.append(
            {
                "prompt": prompt,
                "completion": completion,
                "answer": [[start, len(prompt) + len(completion)]],
                "first": [[0, 1]] if number % 2 else None,
            }
        )
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def completion(tiny_recipe: Callable[..., Recipe], pairs: Path) -> Callable[..., Recipe]:
    def make(*policy: dict[str, Any], **sections: Any) -> Recipe:
        dataset = {"name": str(pairs), "format": "completion", "max_seq_length": 32}
        values: dict[str, Any] = {"dataset": dataset, "training": TRAINING, "policy": list(policy)}
        return tiny_recipe(**(values | sections))

    return make


def load(recipe: Recipe, *columns: str) -> tuple[Any, Data]:
    tokenizer = build_tokenizer(recipe.model)
    return tokenizer, build_data(recipe.dataset, tokenizer, columns)


def run_of(recipe: Recipe, prepared: Callable[[Recipe], RunFolder]) -> RunFolder:
    torch.set_num_threads(1)
    run = prepared(recipe)
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return run


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.path / "model" / "model.safetensors")


def same_weights(one: RunFolder, other: RunFolder) -> bool:
    a, b = weights(one), weights(other)
    return all(torch.equal(a[name], b[name]) for name in a)


def values_of(run: RunFolder, name: str) -> list[float]:
    return [value for _, value in History.load(run.path).series(name).items()]


def test_spans_of_characters_mark_the_tokens_that_touch_them(completion) -> None:
    tokenizer, data = load(completion(), "answer", "first")
    for example in data.train[:12]:
        assert set(example.columns) == {"answer", "first"}
        assert all(len(column) == len(example.input_ids) for column in example.columns.values())
        answer = tokenizer.decode(example.input_ids[example.columns["answer"] == 1])
        whole = tokenizer.decode(example.input_ids[example.labels != -100])
        assert answer.endswith("</s>"), "the end goes with a span that reaches it"
        assert whole.split()[-1] in answer.replace(" ", "") or whole.split()[-1] == answer.strip()
    first = [tokenizer.decode(e.input_ids[e.columns["first"] == 1]) for e in data.train[:4]]
    assert set(first) == {"", "Line"}


def test_packed_text_is_marked_at_the_same_places(tiny_folder, tiny_recipe) -> None:
    path = tiny_folder / "marked.jsonl"
    rows = [{"text": text, "fox": [[m, m + 3]] if (m := text.find("fox")) >= 0 else []} for text in TEXTS * 8]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    tokenizer, data = load(tiny_recipe(dataset={"name": str(path), "max_seq_length": 16}), "fox")
    ids = [i for e in data.train for i, marked in zip(e.input_ids, e.columns["fox"], strict=True) if marked]
    decoded = tokenizer.decode(ids).replace("</s>", "").replace(" ", "")
    assert decoded
    assert set(decoded) <= set("foxand"), decoded
    assert decoded.count("fox") > 10


@pytest.mark.parametrize("wrong", ["0 1", [3, 4], [[1, 2, 3]], [[2, 1]], [[-1, 2]], [["0", "1"]], 7], ids=repr)
def test_a_column_of_something_else_is_refused(tiny_folder, tiny_recipe, wrong) -> None:
    path = tiny_folder / "wrong.jsonl"
    path.write_text(json.dumps({"text": "the quick brown fox " * 20, "marks": wrong}), encoding="utf-8")
    recipe = tiny_recipe(dataset={"name": str(path), "max_seq_length": 16})
    with pytest.raises(
        DataError, match=r"wrong.jsonl, line 1: column 'marks' must be a list of \[start, end\] in characters"
    ):
        load(recipe, "marks")
    with pytest.raises(DataError, match=r"no column 'mark'; it has .*did you mean marks"):
        load(recipe, "mark")


def test_prompts_can_be_trained_on_and_are_never_counted_in_evaluation(completion) -> None:
    recipe = completion()
    whole = recipe.model_copy(update={"dataset": recipe.dataset.model_copy(update={"train_on": "all"})})
    (_, masked), (_, dense) = load(recipe), load(whole)
    assert [e.input_ids.tolist() for e in masked.train] == [e.input_ids.tolist() for e in dense.train]
    assert all((e.labels == e.input_ids).all() for e in dense.train)
    assert all((e.labels == -100).any() for e in masked.train)
    for one, other in zip(masked.held_out, dense.held_out, strict=True):
        assert one.labels.tolist() == other.labels.tolist()
    assert masked.digest() != dense.digest()


def test_columns_change_the_digest_and_only_training_batches_bring_them(completion) -> None:
    recipe = completion()
    tokenizer, plain = load(recipe)
    _, marked = load(recipe, "answer")
    assert plain.digest() != marked.digest()
    order = BatchOrder(marked.train, 4, 0, tokenizer.pad_token_id, columns={"answer"})
    batch = order[0]
    assert batch["answer"].shape == batch["input_ids"].shape
    assert not batch["answer"][batch["attention_mask"] == 0].any()
    assert set(collate(marked.held_out[:4], tokenizer.pad_token_id)) <= {"input_ids", "labels", "attention_mask"}


def test_a_mask_of_all_labels_trains_as_dense(completion, tiny_recipe, prepared) -> None:
    """Bitwise where nothing can be left out; to rounding where prompts let it leave work out.

    By SGD there: Adam divides by the gradient's size, so a gradient near zero moves a weight by its last bit's sign.
    """
    policy = [{"name": "tokens", "score": "mask"}]
    assert same_weights(run_of(tiny_recipe(), prepared), run_of(tiny_recipe(policy=policy), prepared))
    training = TRAINING | {"optim": "sgd", "learning_rate": 0.1}
    dense = run_of(completion(training=training), prepared)
    masked = run_of(completion(*policy, training=training), prepared)
    found, expected = weights(masked), weights(dense)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
    assert set(values_of(masked, "policy/trained_share")) == {1.0}
    assert "policy/trained_share" not in History.load(dense.path).metrics


def test_a_masked_run_is_the_plain_loop_with_masked_labels(completion, prepared) -> None:
    """Accumulation included: every marked token of a step weighs alike."""
    recipe = completion({"name": "tokens", "score": "mask", "mask_column": "answer"})
    run = run_of(recipe, prepared)
    training = recipe.training
    tokenizer, data = load(recipe, "answer")
    torch.manual_seed(training.seed)
    model = build_model(recipe.model, tokenizer, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate)
    order = BatchOrder(data.train, 4, training.seed, tokenizer.pad_token_id, columns={"answer"})
    shares = []
    for step in range(training.max_steps):
        optimizer.param_groups[0]["lr"] = training.learning_rate * (1 - step / training.max_steps)
        batches = [order[2 * step], order[2 * step + 1]]
        targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        for batch in batches:
            batch["labels"] = batch["labels"].masked_fill(batch.pop("answer") == 0, -100)
        trained = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        for batch in batches:
            model(**batch, num_items_in_batch=torch.tensor(trained)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shares.append(trained / targets)
    assert values_of(run, "policy/trained_share") == pytest.approx(shares)
    assert values_of(run, "policy/kept_share") == pytest.approx(shares)
    assert 0.1 < min(shares) < 0.9
    found = weights(run)
    for name, parameter in model.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-4)  # steps of 1e-2


POLICIES: list[dict[str, Any]] = [
    {"name": "tokens", "score": "random", "keep": 0.5},
    {"name": "tokens", "score": "loss", "keep": 0.3, "mode": "detach"},
    {
        "name": "tokens",
        "score": "entropy",
        "keep": 0.5,
        "mask_column": "answer",
        "within": "example",
        "mode": "detach",
    },
    {"name": "selective-backprop", **ALWAYS, "keep": 0.5, "scale_factor": 0.5},
    {"name": "uniform", "interrupt": 0},
]


@pytest.mark.always("tokens-loss", "selective-backprop-")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p['name']}-{p.get('score', '')}")
def test_measuring_changes_nothing_and_a_resumed_run_is_the_same(completion, prepared, policy) -> None:
    quiet = {"eval_every": 5, "eval_examples": 8, "probe_every": None, "fidelity_every": None}
    straight = run_of(completion(policy, measure=quiet), prepared)
    probed = {"eval_every": 2, "eval_examples": 8, "probe_every": 3, "fidelity_every": 3, "fidelity_draws": 2}
    measured = prepared(completion(policy, measure=probed, checkpoint={"every": 3}))
    process = start(measured)
    while process.is_alive() and len(values_of(measured, "train/loss")) < 5:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert work(measured) == 0, (measured.path / "worker.log").read_text()
    assert same_weights(straight, measured)
    assert values_of(straight, "train/loss") == values_of(measured, "train/loss")
    assert values_of(straight, "policy/trained_share") == values_of(measured, "policy/trained_share")
    scores = policy.get("score") in ("loss", "entropy") or policy["name"] == "selective-backprop"
    assert all((seconds > 0.0) == scores for seconds in values_of(measured, "time/scoring_seconds"))
    flops = values_of(measured, "flops/scoring")
    assert flops
    assert all((count > 0) == scores for count in flops)
    assert all(excess < 0.01 for excess in values_of(measured, "proof/excess_share"))
    highest = max(values_of(measured, "speed/ceiling"))
    assert highest > 1.05
    if policy["name"] == "uniform":
        assert highest == pytest.approx(2.0), "half of the examples, and nothing to choose them"
    if policy["name"] == "selective-backprop":
        assert 1.4 < highest < 2.0, "less the forward of half of the positions"


def test_tokens_go_with_a_gradient_policy(completion, prepared) -> None:
    run = run_of(completion({"name": "tokens", "score": "loss", "keep": 0.5}, {"name": "topk", "keep": 0.25}), prepared)
    assert values_of(run, "policy/trained_share") == pytest.approx([0.5] * 8, abs=0.05)
    # Of all positions: those that tokens left out are not kept either.
    for kept, carried in zip(values_of(run, "policy/kept_share"), values_of(run, "policy/carried_share"), strict=True):
        assert 0.25 * 0.5 * carried < kept < 0.5 * carried


def test_both_go_with_mixed_precision_adapters_and_checkpointing(completion, prepared) -> None:
    recipe = completion(
        {"name": "tokens", "score": "loss", "keep": 0.5},
        {"name": "selective-backprop", **ALWAYS},
        training=TRAINING | {"mixed_precision": "bf16"},
        model={"lora": {"r": 2}},
        backward={"checkpointing": "full"},
        measure={"eval_every": 4, "eval_examples": 4, "probe_every": 4, "fidelity_every": None},
    )
    run = run_of(recipe, prepared)
    assert (run.path / "model" / "adapter" / "adapter_model.safetensors").exists()
    assert all(0.1 < share < 0.4 for share in values_of(run, "policy/trained_share"))
    assert all(seconds > 0.0 for seconds in values_of(run, "time/scoring_seconds"))
    losses = values_of(run, "train/loss")
    assert losses[-1] < losses[0]
