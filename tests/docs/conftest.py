"""The example plugin as an installed distribution, whether or not it is installed here."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.docs.block import ROOT

PLUGIN = ROOT / "plugins" / "sparsebp-stride"


@pytest.fixture
def plugin_folder(tmp_path: Path) -> Path:
    """A folder that, on the import path, makes the plugin known as pip would."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = tmp_path / "site"
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    entries = project["entry-points"]["sparsebp.policies"]
    lines = "\n".join(f"{name} = {target}" for name, target in entries.items())
    (info / "entry_points.txt").write_text(f"[sparsebp.policies]\n{lines}\n", encoding="utf-8")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    return folder


@pytest.fixture
def stride(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the plugin known to this process."""
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.syspath_prepend(plugin_folder)
