"""The benchmark of whole steps runs, and writes what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.block import ROOT


@pytest.mark.slow
def test_the_benchmark_runs_and_every_way_is_in_its_table(tmp_path: Path) -> None:
    out = tmp_path / "tokens.json"
    command = [sys.executable, "benchmarks/tokens.py", "--tiny", "--family", "phi", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["facts"]["is_tiny"]
    cases = {(row["layout"], row["keep"], row["way"]): row for row in found["rows"]}
    assert len(cases) == len(found["rows"]) == 2 * 3 * 4
    for (layout, keep, way), row in cases.items():
        dense = cases[layout, keep, "dense"]
        assert (row["flops"] < dense["flops"]) == (way in ("exact", "detach"))
        assert (row["ceiling"] > 1.0) == (way in ("exact", "detach"))
        assert (row["saved_bytes"] < dense["saved_bytes"]) == (way in ("exact", "detach"))
        assert cases[layout, keep, "detach"]["flops"] < cases[layout, keep, "exact"]["flops"]
    table = done.stdout.splitlines()
    assert len(table) == 25
    assert max(len(line) for line in table) <= 100
