"""What every test starts from: a home of its own, one thread, no hub, no tracking server of somebody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    MLFLOW_DISABLE_TELEMETRY="true",
    DO_NOT_TRACK="true",
    COLUMNS="100",
)
for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh ``$SPARSEBP_HOME``."""
    folder = tmp_path / "home"
    monkeypatch.setenv("SPARSEBP_HOME", str(folder))
    return folder
