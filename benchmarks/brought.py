"""Brings what a training of docs/results needs and this machine has not: runs of an archive, models and data."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

SPARSEBP = [sys.executable, "-c", "from sparsebp_cli.cli.app import main; main()"]


def fetch(recipe: Path, environment: Mapping[str, str]) -> None:
    """Download the model and the data that a recipe names, if they can be fetched; what is here stays."""
    from sparsebp_tools.asset.fetched import FETCHED

    keys = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    if wanted := [name for name in (keys["model"]["name"], keys["dataset"]["name"]) if name in FETCHED]:
        subprocess.run([*SPARSEBP, "fetch", *wanted], env=environment, check=True)


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
