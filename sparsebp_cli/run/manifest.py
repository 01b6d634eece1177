"""Write and verify the manifest of a saved model or checkpoint: the sha256 of each of its files."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from sparsebp_cli.run.budget import LARGEST_PLAN, open_regular, read_json

MANIFEST = "manifest.json"
OUTPUTS = "outputs"  # key of the manifest: the trained model's outputs for a batch
MOST_HOLES = 64 << 30  # unallocated bytes of a sparse file; reading them still takes time


def write_manifest(folder: Path, more: Mapping[str, object] | None = None) -> None:
    """Write the sha256 of every file in a folder to its manifest, for :func:`find_damage`. ``more`` is stored beside
    the list."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
    listed = {str(file.relative_to(folder)): digest(file) for file in files}
    # Do not wait for the disk: `durable.put_folder` waits for the whole folder.
    (folder / MANIFEST).write_bytes(json.dumps({"format": 1, "sha256": listed, **(more or {})}, indent=1).encode())


def find_damage(folder: Path) -> str:
    """Return what is wrong with a folder according to its manifest, in one line; empty if every listed file is intact.
    A folder without a manifest counts as damaged, because it cannot be verified. So does a folder with a link, a pipe
    or a device: no run writes these, and a later reader may follow them or block for ever."""
    try:
        listed: dict[str, str] = read_json(folder / MANIFEST, LARGEST_PLAN)["sha256"]
        if odd := _find_odd(folder):
            return f"{odd} is neither a regular file nor a folder"
        for name, expected in listed.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"{name!r} is outside the folder"
            if digest(folder / name) != expected:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return "" if listed else "the manifest is empty"


def digest(file: Path) -> str:
    """Return the sha256 of a file. Raise ``OSError`` if it cannot be read, or is sparse with more than
    :data:`MOST_HOLES` bytes of holes."""
    with open_regular(file) as opened:
        found = os.fstat(opened.fileno())
        if found.st_size - found.st_blocks * 512 > MOST_HOLES:
            raise OSError(f"{file} is a sparse file (a file with holes), which is not allowed")
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _find_odd(folder: Path) -> str:
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            mode = Path(place, name).lstat().st_mode
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                return str(Path(place, name).relative_to(folder))
    return ""
