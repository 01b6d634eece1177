"""``benchmarks/trainer.py`` runs, and counts what the guide says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_the_benchmark_compares_the_script_before_and_after(tmp_path: Path) -> None:
    out = tmp_path / "trainer.json"
    command = [sys.executable, "benchmarks/trainer.py", "--tiny", "--out", str(out), "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    ways = {way["name"]: way for way in result["ways"]}
    assert list(ways) == [
        "before, all tokens",
        "before: loss mask",
        "the same, dense engine",
        "after: exact",
        "after: detach",
    ]
    assert result["command"] == "python benchmarks/trainer.py --tiny"
    work = {name: way["forward_flops"] + way["backward_flops"] for name, way in ways.items()}
    assert work["before, all tokens"] == work["before: loss mask"] == work["the same, dense engine"]
    assert work["after: detach"] < work["after: exact"] < work["before: loss mask"]
    for name, way in ways.items():
        assert way["pass_ceiling"] == work["before: loss mask"] / work[name]
        assert way["step_seconds"]["number"] == result["rounds"] * result["steps"] == 1
        assert way["step_seconds"]["median"] > way["pass_seconds"]["median"] > 0
        assert len(name) <= 24
        assert f"\n{name:<24}" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
