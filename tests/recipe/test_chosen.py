"""Policies that choose tokens or examples: what does not go together is said at the recipe, with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsebp_cli.errors import RecipeError
from sparsebp_cli.recipe import load_recipe

HEAD = "version: 1\nmodel: {name: austen-llama}\n"
TEXT = "dataset: {name: cmudict, format: completion}\n"
CLASSES = "dataset: {name: cmudict, format: classification}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        (
            CLASSES + "policy: {name: tokens, score: loss, keep: 0.5}\n",
            "4:16: policy.0.name",
            "'tokens' chooses among token labels",
        ),
        (
            TEXT + "policy: {name: tokens, score: mask}\nbackward: {sites: nodes}\n",
            "4:16: policy.0.name",
            "'tokens' needs backward.sites: linears, got nodes",
        ),
        (
            TEXT + "policy: uniform\ntarget: {kind: local, processes: 2, sharding: fsdp2}\n",
            "4:9: policy.0.name",
            "'uniform' needs target.sharding: none",
        ),
        (TEXT + "policy: {name: tokens, score: excess, keep: 0.5}\n", "policy.0", "needs the option reference"),
        (TEXT + "policy: {name: tokens, score: los, keep: 0.5}\n", "policy.0.score", "did you mean loss"),
        (TEXT + "policy: {name: tokens, score: loss}\n", "policy.0", "'score: loss' needs keep"),
        (
            TEXT + "policy: {name: selective-backprop, scale_factor: 2.0}\n",
            "policy.0.scale_factor",
            "in (0, 1], got 2.0",
        ),
        (TEXT + "policy: [uniform, selective-backprop]\n", "policy.1.name", "make the same decision"),
    ],
)
def test_what_does_not_go_is_refused_at_its_place(tmp_path, text, place, reason) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, HEAD + text))
    assert place in str(caught.value)
    assert reason in str(caught.value)


def test_policies_of_several_kinds_stand_in_one_recipe(tmp_path) -> None:
    text = "policy: [{name: tokens, score: loss, keep: 0.5}, {name: topk, keep: 0.1}, uniform]\n"
    recipe = load_recipe(write(tmp_path, HEAD + TEXT + text))
    assert [entry.name for entry in recipe.policy] == ["tokens", "topk", "uniform"]
    assert recipe.policy[0].options["mode"] == "exact"
