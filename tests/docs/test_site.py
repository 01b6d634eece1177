"""The documentation of several versions as one site."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.block import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with two releases and a main that is ahead of them; its documentation is one page."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "docs" / "_templates", folder / "docs" / "_templates")
    for name in ("conf.py", "site.py", "recipe.schema.json"):
        shutil.copy(ROOT / "docs" / name, folder / "docs")
    (folder / "sparsebp_cli").mkdir()
    _git(folder, "init", "--quiet", "--initial-branch", "main")
    for version in ("0.9.0", "0.10.0", "0.11.0"):
        (folder / "sparsebp_cli" / "__init__.py").write_text(f'__version__ = "{version}"\n')
        (folder / "docs" / "index.md").write_text(f"# What {version} says\n")
        _git(folder, "add", "--all")
        _git(folder, "commit", "--quiet", "--message", version)
        if version != "0.11.0":
            _git(folder, "tag", f"v{version}")
    return folder


@pytest.mark.slow
def test_every_version_is_built_from_its_own_pages_and_links_to_the_others(checkout: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = _build(checkout, site)
    assert done.stdout.split() == ["main", "v0.10.0", "v0.9.0"], done.stderr
    front = (site / "index.html").read_text()
    assert [front.index(f'"{name}/index.html"') for name in done.stdout.split()] == sorted(
        front.index(f'"{name}/index.html"') for name in done.stdout.split()
    )
    for name, version in {"main": "0.11.0", "v0.10.0": "0.10.0", "v0.9.0": "0.9.0"}.items():
        page = (site / name / "index.html").read_text()
        assert f"What {version} says" in page
        assert f"<title>SparseBP {version}" in page  # the package of the revision, not the one that is installed
        assert all(f'href="../{other}/index.html"' in page for other in done.stdout.split())


@pytest.mark.slow
def test_a_version_that_cannot_be_built_ends_the_command_by_name(checkout: Path, tmp_path: Path) -> None:
    (checkout / "docs" / "conf.py").write_text("raise RuntimeError('no')\n")
    _git(checkout, "commit", "--quiet", "--all", "--message", "broken")
    done = _build(checkout, tmp_path / "site")
    assert done.returncode != 0
    assert "main cannot be built" in done.stderr


def _build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, checkout / "docs" / "site.py", site],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )


def _git(folder: Path, *words: str) -> None:
    person = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *person, *words], cwd=folder, check=True, capture_output=True)
