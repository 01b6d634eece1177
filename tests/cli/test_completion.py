"""What the shell completes: keys and values of recipes, metrics, policies."""

from __future__ import annotations

import pytest
import typer

from sparsebp_cli.cli.app import app
from sparsebp_cli.cli.completion import complete_change, complete_metric, complete_policy
from sparsebp_cli.recipe import Recipe


def test_keys_of_a_recipe_and_options_of_its_first_policy_are_completed() -> None:
    assert complete_change("training.max_st") == ["training.max_steps="]
    assert "training.learning_rate=" in complete_change("training.")
    assert {"policy.0.keep=", "policy.0.along="} <= set(complete_change("policy.0."))
    assert complete_change("~training.warmup_st") == ["~training.warmup_steps"]
    assert complete_change("nothing.") == []


def test_every_key_of_the_dataset_is_completed_and_no_other() -> None:
    keys = {word.rstrip("=").removeprefix("dataset.") for word in complete_change("dataset.")}
    assert keys == Recipe.model_fields["dataset"].annotation.model_fields.keys()


def test_values_follow_the_equals_sign_where_they_are_known() -> None:
    assert complete_change("dataset.format=c") == [
        "dataset.format=completion",
        "dataset.format=chat",
        "dataset.format=classification",
    ]
    assert complete_change("policy=loss") == ["policy=lossless"]
    assert complete_change("policy.0.name=top") == ["policy.0.name=topk"]
    assert complete_change("training.max_steps=5") == []


def test_metrics_and_policies_are_completed_with_a_help_text() -> None:
    assert {"eval/loss", "eval/accuracy", "eval/macro_f1"} <= set(dict(complete_metric("eval/")))
    assert set(dict(complete_metric("eval/m"))) == {"eval/macro_f1", "eval/mcc"}
    assert complete_policy("tok") == [("tokens", "TokenSelector")]


@pytest.mark.parametrize(
    ("words", "typed", "completed"),
    [
        (["run", "r.yaml", "--set"], "training.max_st", "training.max_steps="),
        (["compare", "--metric"], "eval/l", "eval/loss"),
        (["compare", "--metric"], "train/lo", "train/loss"),
        (["policies"], "tokens", "tokens"),
        (["bench"], "dropb", "dropbp"),
        (["recipes", "copy"], "topk", "topk-rows"),
        (["run"], "topk-r", "topk-rows"),
        (["run"], "study/topk-r", "study/topk-rows"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_shell_gets_these_completions(
    words: list[str], typed: str, completed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SPARSEBP_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(["sparsebp", *words, typed]))
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    with pytest.raises(SystemExit):
        typer.main.get_command(app)(prog_name="sparsebp", args=[])
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == [completed]
