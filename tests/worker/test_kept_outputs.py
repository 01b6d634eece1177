"""Runs that keep the output of frozen layers: the same training, at the price that was counted, through kills."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.recipe import load_recipe
from sparsebp_cli.run import History, RunFolder
from tests.chaos.kill import kill_at_random
from tests.worker.conftest import LLAMA, work
from tests.worker.test_price import spend, uneven

__all__ = ["uneven"]  # a fixture

FROZEN = {"name": "frozen", "freeze": ["*embed_tokens*", "/layers\\.[01]\\./"]}
MODEL = {"config": LLAMA | {"num_hidden_layers": 4, "use_cache": False}}
PER_EPOCH, STEPS = 6, 18  # of 24 examples, four in a step
FOLDER = "cache"


@pytest.fixture
def short(tiny_recipe: Any, tmp_path: Path) -> Any:
    """Make a recipe of three epochs over the same few blocks of one length."""
    words = [line for number in range(200) for line in ("the quick", "brown fox", f"jumps {number * 7 % 31} times")]
    file = tmp_path / "short.txt"
    file.write_text(" ".join(words))

    def make(policy: Any, **sections: Any) -> Any:
        dataset = {"name": str(file), "max_seq_length": 32, "max_train_examples": 24} | sections.pop("dataset", {})
        training = {"max_steps": STEPS} | sections.pop("training", {})
        measure = {"probe_every": 7, "fidelity_every": None, "eval_every": STEPS} | sections.pop("measure", {})
        return tiny_recipe(model=MODEL, policy=policy, dataset=dataset, training=training, measure=measure, **sections)

    return make


def finish(run: RunFolder) -> History:
    assert work(run) == 0, (run.path / "worker.log").read_text()
    return History.load(run.path)


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.path / "model" / "model.safetensors")


def same(one: RunFolder, other: RunFolder) -> bool:
    mine, theirs = weights(one), weights(other)
    losses = [History.load(run.path).series("train/loss") for run in (one, other)]
    return losses[0] == losses[1] and all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.mark.slow
def test_a_run_is_that_without_a_cache_to_the_last_bit_and_costs_less_later(short, prepared) -> None:
    plain, kept = (prepared(short([FROZEN | more])) for more in ({}, {"cache": "disk"}))
    before, after = finish(plain), finish(kept)
    assert same(plain, kept)
    assert after.facts["train_examples"] == 4 * PER_EPOCH
    shares = after.series("policy/known_share")
    assert set(list(shares.values())[PER_EPOCH + 1 :]) == {1.0}
    saved = [
        before.series("flops/step")[step] - after.series("flops/step")[step] for step in range(PER_EPOCH + 2, STEPS)
    ]
    layer = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)  # of one position, in linears
    attention = 4 * 32 * 32  # of one position, with 32 others, for scores and for values
    assert saved == pytest.approx([2 * 4 * 32 * (layer + attention)] * len(saved), rel=0.01)
    assert not (kept.path / FOLDER).exists()  # a run that is done has no use for them


@pytest.mark.slow
def test_the_upper_half_of_a_classifier_costs_at_most_47_percent_of_dense_later(
    tiny_recipe, prepared, tmp_path
) -> None:
    """By the prices in the journal, with texts of unlike length; 0.63 without a cache. The update counts, of embeddings
    that are larger than the layers, as those of small encoders are: of the passes alone it is 0.65 and 0.49."""
    draw = random.Random(2)
    lines = [{"text": "the quick brown fox " * draw.randint(1, 5), "label": number % 2} for number in range(32)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 8000}
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    lower = {"name": "frozen", "freeze": ["bert.embeddings", "/layer\\.[012]\\./"]}
    histories = [
        finish(
            prepared(
                tiny_recipe(
                    model={"config": {"model_type": "bert"} | sizes | none},
                    policy=[lower | more],
                    dataset={
                        "name": str(file),
                        "format": "classification",
                        "eval_fraction": 0.25,
                        "max_seq_length": 32,
                    },
                    training={"max_steps": 12},
                    measure={"probe_every": 12, "fidelity_every": None, "eval_every": 12},
                )
            )
        )
        for more in ({}, {"cache": "memory", "cache_padding": "drop"})
    ]
    plain, kept = (
        [history.series("flops/step")[n] / history.series("flops/step_dense")[n] for n in range(8, 13)]
        for history in histories
    )
    assert histories[1].facts["train_examples"] <= 7 * 4  # so step 8 is of the second epoch
    assert 0.58 < min(plain) <= max(plain) < 0.66
    assert max(kept) <= 0.47
    losses = [list(history.series("train/loss").values()) for history in histories]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["keep", "drop"])
def test_a_run_is_charged_what_it_computes(padding, uneven, prepared, tmp_path, monkeypatch) -> None:
    draw = random.Random(1)
    lines = [
        {"prompt": " ".join(["the quick"] * draw.randint(1, 6)), "completion": draw.choice([" fox", " dog"])}
        for _ in range(24)
    ]
    file = tmp_path / "few.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    policy = [
        {"name": "frozen", "freeze": ["*embed_tokens*", "*layers.0*"], "cache": "memory", "cache_padding": padding}
    ]
    recipe = uneven(policy=policy, dataset={"name": str(file)})
    charged, counted = spend(recipe, prepared, monkeypatch)
    assert charged.passes == pytest.approx(counted.passes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_left_alone(place, short, prepared) -> None:
    recipe = short([FROZEN | {"cache": place, "cache_dtype": "int8"}], checkpoint={"every": 3})
    straight, killed = prepared(recipe), prepared(recipe)
    finish(straight)
    chance = random.Random(0)
    for _ in range(3):
        kill_at_random(killed, chance, longest=8)
    known = [*(killed.path / FOLDER).rglob("*")] if place == "disk" else []
    assert place == "memory" or known
    finish(killed)
    assert same(straight, killed)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"turn": "layers", "cache": "memory"}, "cache needs layers that are frozen all the time"),
        ({"freeze": ["*"], "cache_dtype": "int8"}, "cache_dtype needs cache: memory or disk"),
        ({"freeze": ["*"], "cache": "ram"}, "got 'ram', allowed: 'memory', 'disk'"),
        ({"freeze": ["*"], "cache": "memory", "cache_bytes": 0}, "must be above 0, got 0"),
    ],
)
def test_a_recipe_that_means_nothing_is_one_line(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "version: 1\nname: x\nmodel: {name: austen-llama}\ndataset: {name: python-docs}\n"
        f"policy: [{json.dumps({'name': 'frozen', **options})}]\n"
    )
    with pytest.raises(RecipeError) as raised:
        load_recipe(file)
    assert text in str(raised.value)


@pytest.mark.slow
def test_gaps_that_are_drawn_at_each_visit_are_refused(tiny_recipe, prepared, tiny_folder) -> None:
    """A tokenizer of the tests has no mask; a masked language model draws one."""
    masked = AutoTokenizer.from_pretrained(tiny_folder / "tokenizer")
    masked.add_special_tokens({"mask_token": "<mask>"})
    masked.save_pretrained(tiny_folder / "masked")
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 64}
    lower = {"name": "frozen", "freeze": ["*embeddings*", "*decoder*", "/layer\\.0\\./"], "cache": "memory"}
    model = {"config": config | none, "tokenizer": str(tiny_folder / "masked")}
    run = prepared(tiny_recipe(model=model, policy=[lower]))
    assert work(run) != 0
    assert "the gaps of a masked language model are drawn anew" in (run.path / "journal.jsonl").read_text()
