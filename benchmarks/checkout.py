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
PACKAGES = {"sparsebp": ROOT} | {
    f"sparsebp-{name}": ROOT / "plugins" / f"sparsebp-{name}" for name in ("tools", "shelf")
}


def use_checkout() -> None:
    """Put the packages of the checkout first on the path; write the metadata of those that are not installed."""
    sys.path[:0] = [str(package) for package in PACKAGES.values()]
    folder = Path(tempfile.mkdtemp(prefix="sparsebp-metadata-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, package in PACKAGES.items():
        try:
            version(name)
        except PackageNotFoundError:
            _write_metadata(package, folder)
    sys.path.append(str(folder))


def _write_metadata(package: Path, folder: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # A hyphen in the folder's name would end the name that importlib.metadata reads.
    place = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (place / "entry_points.txt").write_text("\n".join(lines))
