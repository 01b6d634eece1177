"""Scripts as anybody would write them: the audit knows nothing of them. Other fixtures are those of SparseBP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import _forget_compiled, _keep_process, home_folder

__all__ = ["_forget_compiled", "_keep_process", "home_folder"]
Audit = Callable[..., subprocess.CompletedProcess[str]]
PLAIN = """
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
for step in range(6):
    labels = torch.randint(0, 4, (8,))
    nn.functional.cross_entropy(model(torch.randn(8, 16)), labels).backward()
    optimizer.step()
    model.zero_grad()
    print("step", step, flush=True)
    if "crash" in sys.argv and step == 1:
        raise ValueError("no luck")
print("end", float(model[2].weight.sum()), flush=True)
sys.exit(7 if "seven" in sys.argv else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A plain loop whose optimizer forgot the first layer."""
    file = tmp_path / "train.py"
    file.write_text(PLAIN, encoding="utf-8")
    return file


@pytest.fixture
def run_audit(tmp_path: Path) -> Audit:
    """Runs ``sparsebp audit`` as a user does."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "sparsebp"), "audit", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)

    return run


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave these tests, which have models, alone with ``--fast``."""
    return True if config.getoption("fast", default=False) else None
