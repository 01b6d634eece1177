"""``--set`` and ``~``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparsebp_cli.recipe import Recipe
from tests.recipe.conftest import INSTALLED, SMALL

Refuse = Callable[..., str]
Read = Callable[..., Recipe]

FULL = SMALL + "policy: [{name: topk, keep: 0.1}]\ntraining: {max_steps: 7}\n"


def test_values_are_read_as_yaml_and_missing_sections_are_made(read: Read) -> None:
    recipe = read(
        SMALL,
        "training.max_steps=9",
        "training.learning_rate=3e-4",
        "training.max_grad_norm=",
        "model.lora.r=4",
        "backward.exclude=[lm_head, 'a=b']",
        "target=local",
        "target.threads=2",
        "tracking.uri=http://host/?a=b",
    )
    assert (recipe.training.max_steps, recipe.training.learning_rate, recipe.training.max_grad_norm) == (9, 3e-4, None)
    assert recipe.model.lora is not None
    assert recipe.model.lora.r == 4
    assert recipe.backward.exclude == ["lm_head", "a=b"]
    assert recipe.target.threads == 2
    assert recipe.tracking.uri == "http://host/?a=b"


def test_lists_are_reached_by_index_and_grow_at_the_end(read: Read) -> None:
    assert read(FULL, "policy.0.keep=0.2").policy[0].options["keep"] == 0.2
    assert read(SMALL, "policy.0.name=topk", "policy.0.keep=1").policy[0].options["keep"] == 1.0
    assert read(SMALL, "policy=topk", "policy.0.keep=0.3").policy[0].options["keep"] == 0.3
    assert read(SMALL, "backward.exclude=[a]", "backward.exclude.1=b").backward.exclude == ["a", "b"]


def test_a_tilde_deletes(read: Read) -> None:
    assert read(FULL, "~training.max_steps").training.max_steps == 200
    assert read(FULL, "~policy").policy == read(FULL, "~policy.0").policy == read(SMALL).policy
    assert read(FULL, "~name").name == "r"


def test_changes_are_made_in_order_over_the_base(read: Read) -> None:
    Path("b.yaml").write_text(FULL)
    assert read("base: b.yaml\n", "training.max_steps=8", "training.max_steps=9").training.max_steps == 9
    assert read("base: b.yaml\n", "training.max_steps=8", "~training").training.max_steps == 200


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("training.max_steps=x", "training.max_steps: must be a whole number, got 'x' (text)"),
        ("policy.0.keep=1.5", "policy.0.keep: must be in (0, 1], got 1.5"),
        ("policy=tokp", f"policy.0.name: unknown policy 'tokp'; installed: {INSTALLED}; did you mean topk?"),
        ("policy.keep=1", "policy is a list of 1: write an index after policy; did you mean policy.0.keep?"),
        ("policy.5.keep=1", "policy is a list of 1: got index 5, allowed: an index in [0, 1]"),
        (
            "policy.-1.keep=1",
            "policy is a list of 1: write an index after policy; did you mean policy.0.-1.keep?",
        ),
        ("~policy.1", "policy is a list of 1: got index 1, allowed: an index in [0, 0]"),
        (
            "~training.max_step",
            "cannot remove training.max_step, because the recipe does not set it; did you mean max_steps?",
        ),
        ("~training.max_steps.x", "cannot remove training.max_steps.x, because the recipe does not set it"),
        ("training.max_steps.x=1", "training.max_steps is 7, so it has no keys"),
        ("training=", "training: must be a mapping, got nothing"),
        ("base=b.yaml", "set base in the recipe's file; --set cannot change it"),
        ("training.seed={a: 1, a: 2}", "training.seed.a: duplicate key"),
        ("training.optim=*a", "training.optim: an alias (*a) is not allowed in a recipe; repeat the value"),
        ("training.optim=[a", "training.optim: a bracket is not closed, or a comma is missing"),
        (
            "training.seed=1e999",
            "training.seed: is too large for a number, got 1e999; if it is meant as text, put it in quotes",
        ),
        ("training.optim=a\x1b", "training.optim: a control character (U+001B) is not allowed in a recipe"),
    ],
)
def test_a_wrong_change_is_named_as_the_user_gave_it(refuse: Refuse, change: str, expected: str) -> None:
    shown = change.replace("\x1b", "\\x1b")
    assert refuse(FULL, change) == f"--set {shown}: {expected}"


@pytest.mark.parametrize(
    "change", ["", "=", "=1", "a", "a..b=1", ".a=1", "a.=1", "~", "~a=1", "a\nb=1", ".".join("a" * 99) + "=1"]
)
def test_what_is_no_change_is_told_the_form(refuse: Refuse, change: str) -> None:
    line = refuse(FULL, change)
    assert line.startswith("--set ")
    assert line.endswith("must be KEY=VALUE or ~KEY, with a dotted key such as training.max_steps")


def test_an_unknown_key_on_the_way_is_told_the_nearest(refuse: Refuse) -> None:
    line = refuse(FULL, "trainig.max_steps=3")
    assert line.startswith("--set trainig.max_steps=3: trainig: unknown key 'trainig'; allowed: version, ")
    assert line.endswith("; did you mean training?")


def test_what_a_deleted_key_leaves_open_is_named_in_the_file(refuse: Refuse) -> None:
    assert refuse(FULL, "~model").startswith("r.yaml:1:1: model: missing")
