"""The example plugin as an installed distribution, whether or not it is installed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugin import PLUGINS, write_metadata

PLUGIN = PLUGINS / "sparsebp-stride"


@pytest.fixture
def plugin_folder(tmp_path: Path) -> Path:
    """A folder that, on the import path, makes the plugin known as pip would."""
    folder = tmp_path / "site"
    write_metadata(PLUGIN, folder)
    return folder


@pytest.fixture
def stride(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the plugin known to this process."""
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.syspath_prepend(plugin_folder)
