"""Verbs of packages beside the core: there when the package is, else one line that says where they are."""

from __future__ import annotations

import ast
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import house
from sparsebp_cli.cli import plugin, stored_run, validate
from sparsebp_cli.cli.compare import compare
from sparsebp_cli.cli.runs import runs
from sparsebp_cli.cli.schema import schema
from sparsebp_cli.cli.verb_help import HOMES, Verbs
from sparsebp_cli.errors import UsageError

ROOT = Path(house.__file__).parents[1]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes other entry points those that are installed."""

    def offer(**values: str) -> None:
        found = [metadata.EntryPoint(name, value, plugin.GROUP) for name, value in values.items()]
        monkeypatch.setattr(plugin, "entry_points", lambda group: found)
        monkeypatch.setattr(plugin, "BROKEN", {})
        plugin.find_verbs.cache_clear()

    yield offer
    plugin.find_verbs.cache_clear()


@pytest.mark.inventory
def test_every_verb_that_has_a_home_is_of_an_installed_package_here() -> None:
    assert {*HOMES} == {*plugin.find_verbs()}
    assert plugin.BROKEN == {}


@pytest.mark.parametrize("verb", HOMES)
def test_a_verb_whose_package_is_missing_says_how_to_get_it(verb: str) -> None:
    home = HOMES[verb]
    with pytest.raises(UsageError, match=f"`sparsebp {verb}` is in the package {home}: python -m pip install {home}"):
        Verbs(name="sparsebp", commands={}).resolve_command(type("Context", (), {"resilient_parsing": False})(), [verb])


def test_a_study_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_run, "find_tool", lambda name: None)
    line = "--study is in the package sparsebp-lab: python -m pip install sparsebp-lab"
    for ask in (partial(compare, study="tiny"), partial(runs, study="tiny"), partial(schema, study=True)):
        with pytest.raises(UsageError, match=f"^{line}"):
            ask()


def test_a_forecast_whose_package_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "find_tool", lambda name: None)
    line = "--memory is in the package sparsebp-tools: python -m pip install sparsebp-tools"
    with pytest.raises(UsageError, match=f"^{line}"):
        validate.validate([Path("recipe.yaml")], memory=True)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("nowhere_at_all:VERB", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("sparsebp_lab:NOTHING", "AttributeError"),
    ],
)
def test_a_broken_package_takes_no_other_verb_with_it(offered: Any, value: str, reason: str) -> None:
    offered(bad=value, worth="sparsebp_lab:WORTH")
    assert [name for name, _, _ in plugin.load_verbs()] == ["worth"]
    assert reason in plugin.BROKEN["bad"]


def test_a_verb_whose_function_is_missing_is_broken_alone(offered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sparsebp_lab

    entry = plugin.VerbEntry("sparsebp_lab.verb.worth:nothing", "More: runs")
    monkeypatch.setattr(sparsebp_lab, "HALF", entry, raising=False)
    offered(half="sparsebp_lab:HALF", judge="sparsebp_lab:JUDGE")
    assert [name for name, _, _ in plugin.load_verbs()] == ["judge"]
    assert "has no attribute 'nothing'" in plugin.BROKEN["half"]


@pytest.mark.inventory
def test_every_process_that_a_verb_starts_is_a_module_that_exists() -> None:
    """Tests of verbs stand in for these processes, so that a module that moved would be missed by users alone."""
    prefixes = {"measure_apart": "", "ask": "sparsebp_cli.worker.", "ask_worker": "sparsebp_cli.worker."}
    started = set()
    for folder in house.PACKAGES:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in prefixes:
                    first = node.args[0] if node.args else None
                    if isinstance(first, ast.Constant) and isinstance(first.value, str):
                        started.add(prefixes[node.func.id] + first.value)
    assert started >= {"sparsebp_lab.worth", "sparsebp_tools.bench", "sparsebp_cli.worker.preview"}
    assert [name for name in started if not find_runnable(name)] == []


def find_runnable(name: str) -> bool:
    """Return whether ``python -m NAME`` would find something to run."""
    try:
        found = find_spec(name)
        return found is not None and (not found.submodule_search_locations or find_spec(f"{name}.__main__") is not None)
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("code", ["import sys; sys.exit('no licence')", "raise RuntimeError('no licence')"])
def test_a_package_that_ends_at_import_stops_no_other_command(
    code: str, offered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_at_import.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    offered(ends="ends_at_import:VERB")
    assert [*plugin.load_verbs()] == []
    assert "no licence" in plugin.BROKEN["ends"]
