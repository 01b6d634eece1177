"""What the documentation shows can be typed, loaded and run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from sparsebp_cli.cli.app import VERBS, app
from sparsebp_cli.cli.run import make_plans
from sparsebp_cli.errors import RecipeError
from sparsebp_cli.recipe import load_recipe
from sparsebp_lab.study.loader import load_study
from tests.docs.block import FOLLOWED, ROOT, Block, blocks, commands

COMMANDS = commands()
WITH_PYTHON = list(dict.fromkeys(block.file for block in blocks("python") if block.file not in FOLLOWED))
MAKE_TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
IMAGE = "sparsebp:latest"


def _parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Let the command line read its arguments, without doing anything."""
    group: Any = typer.main.get_command(app)
    with group.make_context("sparsebp", list(words)) as context:
        rest = [*getattr(context, "_protected_args", []), *context.args]
        name, verb, rest = group.resolve_command(context, rest)
        with verb.make_context(name, rest, parent=context) as inner:
            return name, dict(inner.params)


def _ours(words: list[str]) -> list[str] | None:
    """Return the arguments that reach sparsebp, in this shell or in a container; None for another program."""
    if Path(words[0]).name == "sparsebp":
        return words[1:]
    if words[:2] == ["docker", "run"]:
        return words[words.index(IMAGE) + 1 :]
    return None


def _missing_model(values: dict[str, Any]) -> str | None:
    """Plan what a command would run; return the model that has to be fetched first, if one has."""
    try:
        assert make_plans(values["recipes"], values["changes"] or [], values["seeds"])
    except RecipeError as error:
        missing = re.search(r"is not on this machine; get it: `sparsebp fetch ([\w.-]+)`", str(error))
        if missing is None:
            raise
        return missing[1]
    return None


def _fetched(page: Path) -> set[str]:
    return {word for other in COMMANDS if other.file == page for word in shlex.split(other.text.partition("fetch")[2])}


@pytest.mark.parametrize("command", COMMANDS, ids=[command.place for command in COMMANDS])
def test_every_command_is_one_that_exists_with_these_options(
    command: Block, stride: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command.text)
    arguments = _ours(words)
    if arguments is not None:
        _, values = _parse(arguments)
        if "recipes" in values and not values.get("like") and command.file not in FOLLOWED:
            assert not (missing := _missing_model(values)) or missing in _fetched(command.file)
    elif words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= MAKE_TARGETS
    elif "pip" in words:
        paths = [word.partition("[")[0] for word in words if word.startswith((".[", "plugins/", "./"))]
        assert all((ROOT / path / "pyproject.toml").exists() for path in paths)
    else:
        assert command.text in {"python3 -m venv .venv", ".venv/bin/pytest"}


def test_a_wrong_verb_or_option_would_be_noticed() -> None:
    for words in (["compar", "@2"], ["run", "recipe.yaml", "--sed", "0"], ["compare", "@2", "-o", "html"]):
        with pytest.raises(Exception, match=r"No such|is not one of"):
            _parse(words)


RECIPES = [block for block in blocks("yaml") if not block.text.startswith(("version: 1\nstudy:", "paper:", "vary:"))]
STUDIES = [block for block in blocks("yaml") if block not in RECIPES]


@pytest.mark.parametrize("block", STUDIES, ids=lambda block: block.place)
def test_every_study_is_accepted(block: Block, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "pyproject.toml").touch()  # recipes have their base in the same checkout
    text = block.text
    if "study:" not in text:  # a part of one
        arms = "arms: {dense: {}, topk: {policy: [{name: topk, keep: 0.25}]}}"
        text = f"version: 1\nstudy: mine\nbase: recipes/start/python-docs.yaml\n{arms}\nseeds: {{report: 3-5}}\n{text}"
    (tmp_path / "study.yaml").write_text(text)
    assert load_study(tmp_path / "study.yaml").firsts


@pytest.mark.parametrize("block", RECIPES, ids=lambda block: block.place)
def test_every_recipe_and_part_of_one_is_accepted(block: Block, tmp_path: Path, stride: None) -> None:
    for file in (ROOT / "recipes" / "start").glob("*.yaml"):
        shutil.copy(file, tmp_path)
    given = set(re.findall(r"^(\w+):", block.text, re.MULTILINE))
    rest = {"version": "1", "model": "{name: austen-llama}", "dataset": "{name: python-docs}"}
    if "config:" in block.text or "version" in given:
        base = ""  # nothing may be missing but a version
        rest = {"version": "1"} if "version" not in given else {}
    else:  # a part of a recipe stands over the smallest one
        base = "base: smallest.yaml\n"
        (tmp_path / "smallest.yaml").write_text("".join(f"{key}: {value}\n" for key, value in rest.items()))
        rest = {"version": "1"}
    shown = tmp_path / "shown.yaml"
    shown.write_text(base + "".join(f"{key}: {value}\n" for key, value in rest.items()) + block.text)
    assert given - {"base"} <= load_recipe(shown).model_fields_set


# trl 1.16 calls arguments and methods of transformers 5.23 by their old names
@pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning")
@pytest.mark.parametrize("file", WITH_PYTHON, ids=lambda file: str(file.relative_to(ROOT)))
def test_python_runs_from_top_to_bottom_and_its_policies_keep_the_contract(file: Path) -> None:
    from sparsebp_cli.metrics import TextMetric
    from sparsebp_cli.policy import Policy
    from sparsebp_cli.target import Target
    from sparsebp_cli.testing import check_policy

    names = _names()
    before = {key: value.clone() for key, value in names["model"].state_dict().items()}
    for block in [block for block in blocks("python") if block.file == file]:
        exec(compile(block.text, block.place, "exec"), names)
    policies = [
        value
        for value in names.values()
        if isinstance(value, type) and issubclass(value, Policy) and value.__module__ == "shown"
    ]
    for policy in policies:
        check_policy(policy, **({"keep": 0.3} if "keep" in policy.model_fields else {}))
    trained = any(not before[key].equal(value) for key, value in names["model"].state_dict().items())
    metrics = [value for value in names.values() if isinstance(value, TextMetric)]
    targets = [value for value in names.values() if isinstance(value, type) and issubclass(value, Target)]
    assert trained or policies or metrics or targets  # else nothing ran


def _names() -> dict[str, Any]:
    """What the examples take for granted: a model, its tokenizer and optimizer, some batches."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = [torch.randint(0, 32, (2, 12)) for _ in range(3)]
    batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    given = {"model": model, "tokenizer": tokenizer, "optimizer": optimizer, "batches": batches}
    return {"__name__": "shown", **given}


def test_the_first_page_names_every_verb() -> None:
    verbs = {verb.__name__ for group in VERBS.values() for verb in group}
    table = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("## Verbs")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", table)) & verbs == verbs


def test_the_two_commands_of_the_readme_are_make_quickstart_and_make_test() -> None:
    first = next(block for block in blocks("console") if block.file.name == "README.md")
    assert first.text == "$ make quickstart\n$ make test\n"
