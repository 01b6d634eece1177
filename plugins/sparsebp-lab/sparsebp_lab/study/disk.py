"""Predict the disk use of a trial from a finished run of its arm: checkpoints by number, and the rest."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparsebp_cli.recipe import Recipe
from sparsebp_cli.run import RunFolder


@dataclass(frozen=True)
class DiskUse:
    """Disk use of a run by part."""

    checkpoint_bytes: float  # one checkpoint
    rest_bytes: float  # model, event log and all other files

    def predict(self, recipe: Recipe) -> float:
        """Return the bytes of a run of this recipe at its end."""
        last = recipe.checkpoint.stop_at
        number = min(recipe.checkpoint.keep_last, recipe.training.max_steps // recipe.checkpoint.every)
        if last is None:
            return self.rest_bytes + number * self.checkpoint_bytes
        return min(recipe.checkpoint.keep_last, 1 + (last - 1) // recipe.checkpoint.every) * self.checkpoint_bytes


def measure_disk(run: RunFolder) -> DiskUse:
    """Measure a finished run; missing checkpoints, which a user may have deleted, count as none."""
    folders = [folder for folder in (run.path / "checkpoints").glob("step-*") if folder.is_dir()]
    each = [_size(folder) for folder in folders]
    return DiskUse(max(each, default=0.0), _size(run.path) - sum(each))


def _size(folder: Path) -> float:
    """Return the bytes of a folder's files, while other processes may write and rename some."""
    size = 0
    for place, _, names in os.walk(folder):  # skips folders that vanished
        for name in names:
            with suppress(FileNotFoundError):
                found = Path(place, name).lstat()
                size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return float(size)
