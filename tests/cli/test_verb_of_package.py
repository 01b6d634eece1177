"""Verbs of packages beside the core: there when the package is, else one line that says where they are."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from sparsebp_cli.cli import plugin
from sparsebp_cli.cli.verb_help import HOMES, Verbs
from sparsebp_cli.errors import UsageError


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


def test_every_verb_that_has_a_home_is_of_an_installed_package_here() -> None:
    assert {*HOMES} == {*plugin.find_verbs()}
    assert plugin.BROKEN == {}


@pytest.mark.parametrize("verb", HOMES)
def test_a_verb_whose_package_is_missing_says_how_to_get_it(verb: str) -> None:
    home = HOMES[verb]
    with pytest.raises(UsageError, match=f"`sparsebp {verb}` is in the package {home}: python -m pip install {home}"):
        Verbs(name="sparsebp", commands={}).resolve_command(type("Context", (), {"resilient_parsing": False})(), [verb])


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
