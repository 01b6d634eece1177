"""``benchmarks/eager.py`` runs, and its bytes are what eager update and APOLLO-Mini promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_weights_gradients_and_state_stay_below_1_3_times_the_weights(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "eager.py"), "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "eager-cpu.json").read_text())
    times = {
        (name, update): values[update]["times_the_weights"]
        for name, values in result["memory"].items()
        for update in ("deferred", "eager")
    }
    assert times["adamw", "deferred"] == pytest.approx(4.0, abs=0.01)
    assert times["apollo-mini", "deferred"] == pytest.approx(2.0, abs=0.1)
    assert times["adamw", "eager"] < 3.1
    assert times["apollo-mini", "eager"] <= 1.3
    for values in result["memory"].values():
        assert values["waited"] == []
        # Of the two norms' weights and the widest matrix no two gradients are there at a time.
        assert values["eager"]["gradient_bytes"] <= 4 * 64 * 172
    assert (tmp_path / "eager-cpu.png").stat().st_size > 10_000
    assert set(result["hook_seconds"]) == {"deferred", "eager", "scanning"}
