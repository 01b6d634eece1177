"""The benchmark runs, and what it writes is complete and names no folder of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "linears.py"


def test_the_benchmark_prints_a_table_and_writes_its_numbers(tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    options = {"rounds": 2, "warmup": 0, "width": 64, "layers": 1, "length": 40, "batch": 1, "vocabulary": 64}
    command = [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in options.items()), f"--out={out}"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert max(len(line) for line in result.stdout.splitlines()) <= 100
    record = json.loads(out.read_text())
    cases = {case["case"]: case for case in record["cases"]}
    assert cases["dense"]["backward_flops_ratio"] == cases["topk elements 0.1"]["backward_flops_ratio"] == 1.0
    assert cases["topk rows 0.1"]["backward_flops_ratio"] < cases["topk rows 0.5"]["backward_flops_ratio"] < 0.6
    assert cases["topk rows 0.1"]["ceiling"] > cases["topk columns 0.5"]["ceiling"] > 1.0
    assert len(cases["plain"]["passes"]) == 2
    assert record["facts"]["threads"] == 1
    assert str(tmp_path) not in out.read_text()
    assert record["command"].startswith("python benchmarks/linears.py --rounds 2")
