"""The example of a scorer from outside: as short as the guide says, and held to the contract by its own tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "plugins" / "sparsebp-rare"


def test_a_scorer_is_a_few_lines() -> None:
    assert len((PLUGIN / "sparsebp_rare.py").read_text().splitlines()) < 40


def test_its_own_tests_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=PLUGIN)
    assert result.returncode == 0, result.stdout
