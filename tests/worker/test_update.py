"""Recipes that share prefixes over all micro-batches of an optimizer step."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.recipe.schema import Recipe
from sparsebp_cli.run import History
from sparsebp_cli.worker.batch import BatchOrder
from sparsebp_cli.worker.price import CountedPass, join_shapes
from tests.chaos.kill import resume_killed
from tests.worker.conftest import work
from tests.worker.test_grouping import make_examples

UPDATE = {"name": "lossless", "prefixes": "update"}
ACCUMULATE = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}


@pytest.fixture
def questions(tiny_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """Make a recipe over long prompts with answers of several lengths; few prompts have many answers each."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    file = tmp_path / "rows.jsonl"

    def make(policy: dict[str, Any], num_prompts: int = 3, **sections: Any) -> Recipe:
        draw = random.Random(0)
        prompts = [" ".join(draw.choices(words, k=20)) for _ in range(num_prompts)] * (180 // num_prompts)
        rows = [{"prompt": p, "completion": " ".join(draw.choices(words, k=draw.randint(1, 9)))} for p in prompts]
        file.write_text("\n".join(map(json.dumps, rows)))
        training = {"max_steps": 6, **ACCUMULATE, **sections.pop("training", {})}
        dataset = {"name": str(file), "format": "completion", "max_seq_length": 64}
        return tiny_recipe(policy=[policy], dataset=dataset, training=training, **sections)

    return make


def test_the_examples_of_a_step_are_those_of_before_in_the_order_of_their_tokens() -> None:
    examples = make_examples(80)
    plain, order = (BatchOrder(examples, 4, seed=1, pad_token_id=0) for _ in range(2))
    order.sort_steps(4)
    for step in (0, 3, 1):
        given = [plain._example(p) for number in range(4 * step, 4 * step + 4) for p in plain._positions(number)]
        found = [order._example(p) for number in range(4 * step, 4 * step + 4) for p in order._positions(number)]
        assert sorted(found) == sorted(given)
        assert found == sorted(given, key=lambda n: (examples[n].input_ids.tobytes(), given.index(n)))
    order.sort_steps(1)
    assert all(torch.equal(order[n]["input_ids"], plain[n]["input_ids"]) for n in range(6))


def test_several_shapes_are_priced_as_one_of_as_many_positions_and_pairs() -> None:
    shapes = [(4.0, 16.0), (2.0, 24.0), (3.0, 8.0)]
    counted = CountedPass(1.0, 8.0 * 4 * 16 + 3.0 * 4 * 16**2, 3.0 * 4 * 16**2, 4, 16)
    assert counted.scale(join_shapes(shapes)) == pytest.approx(sum(map(counted.scale, shapes)))


@pytest.mark.slow
def test_a_run_trains_the_weights_of_dense_for_fewer_flops(questions: Any, prepared: Any) -> None:
    weights, price, notes = {}, {}, {}
    for way in ("dense", "share", "update"):
        policy = {"name": "dense"} if way == "dense" else UPDATE | {"prefixes": way}
        run = prepared(questions(policy, measure={"probe_every": 3, "eval_every": 6}))
        assert work(run) == 0, run.log_file.read_text()
        history = History.load(run.path)
        weights[way] = load_file(run.path / "model" / "model.safetensors")
        price[way] = sum(history.series("flops/step").values())
        notes[way] = " ".join(text for _, _, text in history.notes)
        claimed, executed = (history.series(f"proof/{name}") for name in ("claimed_share", "executed_share"))
        assert way == "dense" or executed == pytest.approx(claimed, rel=1e-3)
        assert not any(history.series("proof/excess_share").values())
    for name, tensor in weights["dense"].items():
        assert torch.allclose(weights["update"][name], tensor, atol=2e-4), name
    assert price["update"] < 0.75 * price["share"] < 0.75 * price["dense"]
    assert "sharing prefixes skipped" in notes["update"]
    assert "sharing prefixes" not in notes["share"]


def test_the_cost_of_an_update_whose_micro_batches_share_nothing_is_claimed_in_full(
    questions: Any, prepared: Any
) -> None:
    training = {"max_steps": 3, "gradient_accumulation_steps": 6, "per_device_train_batch_size": 1}
    run = prepared(questions(UPDATE, 180, training=training, measure={"probe_every": 2, "eval_every": 3}))
    assert work(run) == 0, run.log_file.read_text()
    history = History.load(run.path)
    assert "have no prefix in common" in " ".join(text for _, _, text in history.notes)
    assert "overclaim" not in history.facts
    claimed, executed = (history.series(f"proof/{name}") for name in ("claimed_share", "executed_share"))
    assert executed == pytest.approx(claimed, rel=1e-6)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_same_bits(questions: Any, prepared: Any) -> None:
    resume_killed(questions(UPDATE, training={"max_steps": 6}, checkpoint={"every": 2}), prepared, after=(3,))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"target": {"processes": 2}}, "works in one process"),
        ({"backward": {"update": "eager", "eager_clip": "exact"}}, "the gradients of shared prefixes"),
        ({"policy": [UPDATE, {"name": "tokens", "mode": "exact", "keep": 0.5, "score": "loss"}]}, "prefixes: share"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(
    tiny_folder: Path, tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    from sparsebp_cli.recipe import load_recipe

    recipe = {
        "version": 1,
        "name": "no",
        "model": {"config": {"model_type": "llama"}, "tokenizer": str(tiny_folder / "tokenizer")},
        "dataset": {"name": str(tiny_folder / "text.txt"), "max_seq_length": 16},
        "training": {"max_steps": 2},
        "policy": [UPDATE],
        **sections,
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    with pytest.raises(RecipeError, match=said):
        load_recipe(file)
