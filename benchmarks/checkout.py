"""Makes this checkout importable where it is not installed, with the entry points of its policies."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def use_checkout() -> None:
    """Put the checkout first on the path; if it is not installed, write its metadata, too."""
    sys.path.insert(0, str(ROOT))
    try:
        version("sparsebp")
    except PackageNotFoundError:
        folder = Path(tempfile.mkdtemp(prefix="sparsebp-metadata-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _write_metadata(folder)
        sys.path.append(str(folder))


def _write_metadata(folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    place = folder / f"{project['name']}-{project['version']}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (place / "entry_points.txt").write_text("\n".join(lines))
