"""Installed plugins are read once, and one that comes or goes is seen."""

from __future__ import annotations

import importlib
import shutil
from importlib import metadata
from pathlib import Path

import pytest

from sparsebp_cli.entry_point import entry_points, find_tool


def test_a_package_that_comes_and_goes_is_seen_and_nothing_else_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    group = "sparsebp.test_group"
    assert entry_points(group).names == set()
    info = tmp_path / "comes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: comes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\na = b:C\n")
    importlib.invalidate_caches()
    assert entry_points(group).names == {"a"}
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "entry_points", lambda **_: pytest.fail("read again"))
        assert entry_points(group)["a"].value == "b:C"
    shutil.rmtree(info)
    assert entry_points(group).names == set()


def test_a_tool_that_is_missing_or_broken_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "comes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: comes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sparsebp.tools]\nbroken = nowhere_at_all:X\nfine = shutil:rmtree\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert (find_tool("broken"), find_tool("missing"), find_tool("fine")) == (None, None, shutil.rmtree)


def test_every_group_is_as_importlib_reads_it() -> None:
    for group in ("sparsebp.policies", "sparsebp.optimizers", "sparsebp.targets", "console_scripts"):
        assert sorted(entry_points(group)) == sorted(metadata.entry_points(group=group))
