"""Each verb has an example in its ``--help``, which its command line reads."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer

from sparsebp_cli.cli.app import app

COMMAND = typer.main.get_command(app)
NAMES = COMMAND.list_commands(None)  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_each_verb_has_an_example_that_its_command_line_reads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    verb = COMMAND.get_command(None, name)  # type: ignore[attr-defined, arg-type]
    ours, given, *words = shlex.split(verb.epilog.removeprefix("Example: "))
    assert (ours, given) == ("sparsebp", name)
    assert verb.make_context(name, words).args == []


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_that_is_a_recipe_may_be_the_name_of_one_that_ships(name: str) -> None:
    verb = COMMAND.get_command(None, name)  # type: ignore[attr-defined, arg-type]
    argument = next((one for one in verb.params if one.metavar == "RECIPE" and one.param_type_name == "argument"), None)
    if argument is not None:
        word = "topk-rows" if argument.nargs == 1 else ["topk-rows"]
        found = argument.process_value(typer.Context(verb), word)
        assert [one.name for one in ([found] if isinstance(found, Path) else found)] == ["topk-rows.yaml"]
