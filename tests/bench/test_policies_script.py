"""The benchmark of every policy: none is forgotten, each runs, and what is counted is what the policy leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("policies script")  # it runs once, not once a process

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "policies.py"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("bench") / "policies.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("way", "share"), [("dense, engine", 1.0), ("gact", 1.0), ("uniform 0.5", 0.5), ("dropbp 0.5", None)]
)
def test_counted_work_is_what_the_policy_leaves(recorded, way, share) -> None:
    row = recorded["ways"][way]
    # transformers 5.17 multiplies its rotary frequencies once a batch, however many examples it has
    assert row["flops_share"] == pytest.approx(share, abs=1e-4) if share else 0.5 < row["flops_share"] < 0.75
    assert row["ceiling"] == pytest.approx(1 / row["flops_share"])
    assert (row["realised"] is None) == (row["flops_share"] > 0.98)
