"""A target from outside, written with public names, keeps the contract; its options may have any type."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from sparsebp_cli.errors import UsageError
from sparsebp_cli.recipe import target as targets
from sparsebp_cli.recipe.schema import TargetSection
from sparsebp_cli.recipe.target import FoundTarget
from sparsebp_cli.target import TargetOptions, make_target
from sparsebp_cli.target.local import LocalTarget
from tests.plugin import PLUGINS, write_metadata

PLUGIN = PLUGINS / "sparsebp-folder"


class Colour(enum.Enum):
    RED = "red"


class TypedOptions(TargetOptions):
    there: Path
    ports: tuple[int, ...] = ()
    names: frozenset[str] = frozenset()
    colour: Colour = Colour.RED


class TypedTarget(LocalTarget):
    options_class: ClassVar[type[TargetOptions]] = TypedOptions
    made: ClassVar[list[TargetOptions]] = []

    def __init__(self, options: TargetOptions) -> None:
        super().__init__(options)
        self.made.append(options)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = FoundTarget("typed", "tests", TypedTarget)
    monkeypatch.setattr(targets, "find_target", lambda _: found)
    monkeypatch.setattr("sparsebp_cli.target.find_target", lambda _: found)


@pytest.mark.slow
def test_the_example_of_a_target_passes_its_own_test(tmp_path: Path) -> None:
    write_metadata(PLUGIN, tmp_path / "site")
    paths = [str(tmp_path / "site"), str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=PLUGIN, env=environment)
    assert result.returncode == 0, result.stdout


@pytest.mark.usefixtures("typed")
def test_options_of_every_type_come_from_a_recipe_to_the_target() -> None:
    given = {"kind": "typed", "there": "/x", "ports": [1, 2], "names": ["a"], "colour": "red"}
    section, errors = targets.check_target(given)
    assert errors == []
    assert section is not None
    assert section.model_dump(mode="json").items() >= given.items(), "a plan stores what the recipe said"
    make_target(TargetSection.model_validate(section.model_dump(mode="json")))
    options = TypedTarget.made[-1]
    assert isinstance(options, TypedOptions)
    assert (options.there, options.ports, options.names) == (Path("/x"), (1, 2), frozenset({"a"}))
    assert options.colour is Colour.RED


@pytest.mark.usefixtures("typed")
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("there", 3, "there: must be text, got 3 (a number); put it in quotes"),
        ("ports", ["1"], "ports.0: must be a whole number, got '1' (text); write it without quotes"),
        ("ports", 4, "ports: must be a list, got 4 (a number)"),
        ("colour", "rad", "colour: got 'rad', allowed: 'red'; did you mean red?"),
        ("nodes", 1.5, "nodes: must be a whole number, got 1.5 (a number)"),
    ],
)
def test_a_wrong_option_is_refused_with_its_place(option: str, value: object, said: str) -> None:
    given = {"there": "/x", option: value}
    _, errors = targets.check_target({"kind": "typed", **given})
    assert [f"{error.key}: {error.text}" for error in errors] == [said]
    with pytest.raises(UsageError) as refused:
        make_target(TargetSection.model_validate({"kind": "typed", **given}))
    assert str(refused.value) == f"target.{said}"
