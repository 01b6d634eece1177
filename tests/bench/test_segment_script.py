"""``benchmarks/segments.py`` runs, and the bytes that it tells fall with the number of segments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_script_runs_and_more_segments_hold_fewer_bytes(tmp_path: Path) -> None:
    out = tmp_path / "segments.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "segments.py"), "--tiny", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ways = json.loads(out.read_text(encoding="utf-8"))["ways"]
    assert list(ways) == ["plain", "checkpointed", "2", "3", "4"]
    saved = {way: row["saved_bytes"] for way, row in ways.items()}
    assert saved["plain"] > saved["2"] > saved["4"]
    # As many segments as layers: what checkpointing keeps, but for the last layer, which is not run again.
    assert abs(saved["4"] - saved["checkpointed"]) < 0.2 * saved["plain"]
    assert all(row["peak_bytes"] > row["saved_bytes"] for row in ways.values())
    assert "4 segments" in done.stdout
