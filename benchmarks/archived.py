"""Puts archived runs back beside those that are here, so that a training goes on on another machine."""

from __future__ import annotations

import shutil
from pathlib import Path


def put_back(archive: Path, home: Path) -> None:
    """Copy the runs and the lists of studies of an archive below a home; what is there already stays as it is."""
    from sparsebp_cli.compare.archive import open_archive

    if not archive.exists():
        return
    folder = open_archive(archive)
    for name, copy in (("runs", shutil.copytree), ("studies", shutil.copyfile)):
        (home / name).mkdir(parents=True, exist_ok=True)
        for found in (folder / name).iterdir() if (folder / name).is_dir() else ():
            if not (home / name / found.name).exists():
                copy(found, home / name / found.name)
