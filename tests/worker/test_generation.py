"""``measure.generate``: metrics of greedy texts, equal to those of transformers' own path, and without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.metrics import find_text_metric
from sparsebp_cli.recipe.loader import load_recipe
from sparsebp_cli.recipe.schema import DatasetSection, Recipe
from sparsebp_cli.run import History, RunFolder
from sparsebp_cli.run.journal import list_asked
from sparsebp_cli.source.column import as_rows
from sparsebp_cli.worker.data import build_data
from sparsebp_cli.worker.format import encode
from sparsebp_cli.worker.prompt import make_prompts
from tests.worker.conftest import LLAMA, work

Prepare = Callable[[Recipe], RunFolder]
# Prompts of several lengths, so that batches are padded.
ROWS = [{"prompt": "fox " * (n % 4 + 1) + f"{n % 7} ->", "completion": f" {n % 7}"} for n in range(60)]
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m.role + ':' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)
GENERATE = {"every": 8, "examples": 5, "max_new_tokens": 6, "metrics": ["exact_match", "cer"]}


@pytest.fixture
def recipe(tiny_recipe: Any, tmp_path: Path) -> Callable[..., Recipe]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    dataset = {"name": str(file), "format": "completion", "max_seq_length": 32, "eval_fraction": 0.4}
    dataset |= {"test_fraction": 0.4}

    def make(**sections: Any) -> Recipe:
        model = {"config": LLAMA | {"attention_dropout": 0.2}}
        training = {"max_steps": 24, "learning_rate": 2e-2}
        measure = {"eval_every": 12, "eval_examples": None, "fidelity_every": None, "generate": GENERATE}
        given = {"dataset": dataset, "model": model, "training": training, "measure": measure}
        for name, section in sections.items():
            given[name] = given.get(name, {}) | section if isinstance(section, dict) else section  # type: ignore[operator]
        return tiny_recipe(**given)

    return make


def answer_alone(run: RunFolder, prompts: list[str], most: int) -> list[str]:
    """What transformers makes of each prompt by itself, without padding, from the saved model."""
    tokenizer = AutoTokenizer.from_pretrained(run.path / "model")
    model = AutoModelForCausalLM.from_pretrained(run.path / "model").eval()
    found = []
    for prompt in prompts:
        ids_1T = torch.tensor([tokenizer(prompt)["input_ids"]])
        made_1T = model.generate(ids_1T, max_new_tokens=most, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        found.append(tokenizer.decode(made_1T[0, ids_1T.shape[1] :], skip_special_tokens=True))
    return found


@pytest.mark.slow
def test_the_metrics_are_those_of_greedy_answers_to_the_held_out_prompts(recipe: Any, prepared: Prepare) -> None:
    run = prepared(recipe())
    assert work(run) == 0, run.log_file.read_text()
    history = History.load(run.path)
    assert list(history.series("eval/exact_match")) == [0, 8, 16, 24]
    assert list(history.series("test/exact_match")) == [24]
    assert list(history.samples["validation"]) == [0, 8, 16, 24]
    samples = history.samples["validation"][24]
    assert len(samples["prompt"]) == 3
    documents = [int(number) for number in history.examples[24]["documents"][:5]]
    assert documents == sorted(documents)
    prompts = dict.fromkeys(samples["prompt"])
    assert answer_alone(run, list(prompts), 6)[: len(prompts)] == [
        samples["prediction"][samples["prompt"].index(prompt)] for prompt in prompts
    ]
    # All of the test split, by hand.
    dataset = Recipe.model_validate(run.read_plan()["recipe"]).dataset
    data = build_data(dataset, AutoTokenizer.from_pretrained(run.path / "model"))
    rows = [data.test_rows[example.document] for example in data.test]
    assert 3 < len(rows) < 20
    predictions = answer_alone(run, [str(row["prompt"]) for row in rows], 6)
    references = [str(row["completion"]) for row in rows]
    for name, value in find_text_metric("exact_match").measure("exact_match", predictions, references, {}).items():
        assert history.last(f"test/{name}") == pytest.approx(value)
    assert history.last("test/cer") == pytest.approx(
        find_text_metric("cer").measure("cer", predictions, references, {})["cer"]
    )
    assert history.last("eval/cer") < history.series("eval/cer")[0]
    matches = [p.strip() == r.strip() for p, r in zip(predictions, references, strict=True)]
    assert history.scores[24]["test/exact_match"] == matches
    assert history.scores.keys() == {24}
    assert history.scores[24].keys() == {"eval/exact_match", "test/exact_match"}
    assert history.facts["metrics"]["test/cer"] == {"unit": "edits/character", "better": "lower"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"policy": [{"name": "topk", "keep": 0.5}]},
        {"policy": [{"name": "tokens", "keep": 0.5, "score": "loss"}], "model": {"config": LLAMA}},
        {"policy": [{"name": "lossless"}], "model": {"config": LLAMA}},
        {"backward": {"checkpointing": "full"}},
        {"model": {"lora": {"r": 2, "lora_dropout": 0.1}}, "training": {"mixed_precision": "bf16"}},
    ],
    ids=["dropout", "topk", "tokens", "lossless", "checkpointing", "adapters"],
)
def test_a_run_trains_the_same_weights_with_generations_and_without(
    recipe: Any, prepared: Prepare, more: dict[str, Any]
) -> None:
    training = {"max_steps": 6} | more.pop("training", {})
    measure = {"eval_every": 3}
    generate = GENERATE | {"every": 1, "examples": 4, "max_new_tokens": 3}
    runs = [
        prepared(recipe(training=training, measure=measure | {"generate": section}, **more))
        for section in (generate, None)
    ]
    for run in runs:
        assert work(run) == 0, run.log_file.read_text()
    with_it, without = (History.load(run.path) for run in runs)
    assert len(with_it.series("eval/cer")) == 7
    assert not without.series("eval/cer")
    for name in ("train/loss", "train/grad_norm", "eval/loss", "test/loss"):
        assert dict(with_it.series(name)) == dict(without.series(name))
    (file,) = {path.name for path in (runs[0].path / "model").glob("*.safetensors")}
    saved, plain = (load_file(run.path / "model" / file) for run in runs)
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[name], plain[name]) for name in saved)
    configs = [(run.path / "model" / "generation_config.json") for run in runs]
    assert configs[0].exists() == configs[1].exists()
    assert not configs[0].exists() or configs[0].read_text() == configs[1].read_text()


@pytest.mark.slow
def test_the_best_evaluation_may_be_one_of_generated_texts(recipe: Any, prepared: Prepare) -> None:
    run = prepared(
        recipe(checkpoint={"every": 50, "keep_best": "eval/cer"}, measure={"generate": GENERATE | {"every": 4}})
    )
    assert work(run) == 0, run.log_file.read_text()
    history = History.load(run.path)
    values = {step: value for step, value in history.series("eval/cer").items() if step > 0}
    best = min(values, key=lambda step: (values[step], step))
    assert any(f"best/ has the weights of step {best}, with the best eval/cer" in text for _, _, text in history.notes)


def test_a_conversation_is_continued_behind_the_header_of_the_last_turn(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    rows = as_rows([{"messages": talk}, {"messages": talk[:2]}], "here")
    section = DatasetSection(name="x", format="chat", max_seq_length=64)
    found = make_prompts(rows, encode(rows, section, tokenizer).examples, section, tokenizer)
    for prompt, turns in zip(found, (talk[:3], talk[:1]), strict=True):
        expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert prompt.ids.tolist() == expected
        assert prompt.ends == {tokenizer.eos_token_id}
    assert [prompt.reference for prompt in found] == ["four", "two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: {name: cmudict}\nmeasure: {generate: {}}", r"measure.generate: needs dataset.format: completion"),
        (
            "dataset: {name: cmudict, format: completion}\nmeasure: {generate: {metrics: [exact]}}",
            r"unknown metric 'exact', allowed: bleu, .*did you mean",
        ),
        (
            "dataset: {name: cmudict, format: completion}\nmeasure: {generate: {metrics: [wer, wer]}}",
            r"'wer' and another metric of this run both log wer: leave one of them out",
        ),
        (
            "dataset: {name: cmudict, format: completion}\nmeasure: {generate: {}}\ncheckpoint: {keep_best: eval/cer}",
            r"keep_best: eval/cer is not a validation metric of this run; allowed: eval/loss, eval/exact_match",
        ),
        (
            "dataset: {name: cmudict, format: completion}\nmeasure: {generate: {}}\n"
            "target: {processes: 2, sharding: fsdp2}",
            "measure.generate: needs target.sharding: none",
        ),
    ],
)
def test_what_cannot_be_generated_or_measured_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(f"version: 1\nmodel: {{name: austen-llama}}\n{text}\n")
    with pytest.raises(RecipeError, match=message):
        load_recipe(file)


@pytest.mark.slow
def test_too_few_positions_are_refused_before_anything_is_trained(recipe: Any, prepared: Prepare) -> None:
    run = prepared(recipe(measure={"generate": GENERATE | {"max_new_tokens": 60}}))
    assert work(run) != 0
    history = History.load(run.path)
    assert "max_new_tokens: 60 new tokens after a prompt of" in history.ends[-1]["text"]
    assert "exceed the model's 64 positions" in history.ends[-1]["text"]
    assert not history.metrics


@pytest.mark.slow
def test_a_run_ends_with_the_saved_model_asked_as_a_user_asks_it(recipe: Any, prepared: Prepare) -> None:
    run = prepared(recipe(measure={"generate": None}))
    assert work(run) == 0, run.log_file.read_text()
    asked = list_asked(History.load(run.path))
    assert len(asked) == 3
    found = answer_alone(run, [prompt for prompt, _, _ in asked], 64)
    for (_, reference, answer), alone in zip(asked, found, strict=True):
        text, cut, _ = answer.partition(" ... (")
        assert alone.startswith(text) if cut else alone == text
        assert reference in {row["completion"] for row in ROWS}
    assert "asked" not in json.loads((run.path / "model" / "manifest.json").read_text())["outputs"]
