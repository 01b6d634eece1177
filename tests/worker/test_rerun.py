"""A run that is trained again has the same bits, and is refused before it trains if the data changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run import History, RunFolder, State
from sparsebp_tools.verb.rerun import compare_losses, prepare, read_finished

from .conftest import work


def test_a_run_that_is_trained_again_has_the_same_bits(
    tiny_recipe: Callable[..., Recipe], prepared: Callable[[Recipe], RunFolder], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one sentence that is repeated often enough to fill a few rows of tokens. " * 30)
    recipe = tiny_recipe(dataset={"name": str(text)}, training={"max_steps": 3}, measure={"eval_every": 3})
    old = prepared(recipe)
    assert work(old) == 0
    plan, seal = read_finished(old)
    new = prepare(plan, seal, anyway=False)
    assert work(new) == 0
    before, after = History.load(old.path), History.load(new.path)
    assert compare_losses(before, after).text == "the same bits: all 5 losses are equal"
    assert after.facts["repeats"] == old.run_id
    assert new.state() is State.FINISHED

    text.write_text("other words. " * 200)
    refused = prepare(plan, seal, anyway=False)
    assert work(refused) != 0
    ended = History.load(refused.path)
    assert ended.ends[-1]["changes"][0][0] == "data"
    assert f"changed since run {old.run_id}, which it repeats: data" in ended.ends[-1]["text"]
    assert not ended.metrics
