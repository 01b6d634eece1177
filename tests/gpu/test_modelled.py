"""``benchmarks/gpu.py --fake`` counts forms on a fake GPU and models their times."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.xdist_group("fake gpu"),
    pytest.mark.promise("R35"),
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the fake device"),
]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """The rows of the table, by model and form; no step is counted."""
    out = tmp_path_factory.mktemp("modelled") / "out.json"
    command = [sys.executable, "benchmarks/gpu.py", "--fake", "--tiny", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "modelled, not measured" in done.stdout
    result = json.loads(out.read_text())
    assert result["measured"] is False
    return {(row["model"], row["form"]): row for row in result["forms"]}


def test_the_flops_of_a_form_are_those_of_what_it_keeps(forms: dict[tuple[str, str], Any]) -> None:
    sizes = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096 * 14336 + 14336 * 4096)
    for keep in (0.5, 0.25, 0.1):
        kept = round(keep * 8192) / 8192
        for way in ("no Triton", "Triton, fast"):
            counted = forms["8B", f"rows {keep}"][way]["teraflops"]
            assert counted == pytest.approx(2 * 8192 * sizes * kept / 1e12, rel=1e-3)


def test_one_read_of_the_gradient_and_loops_over_blocks_move_fewer_bytes(forms: dict[tuple[str, str], Any]) -> None:
    for form in ("rows 0.25", "columns 0.25", "blocks of 128, 0.25"):
        row = forms["1B", form]
        assert row["Triton, fast"]["gigabytes"] < row["CPU's forms"]["gigabytes"] / 1.5, form
    assert forms["1B", "blocks of 128, 0.25"]["no Triton"]["teraflops"] == pytest.approx(
        forms["1B", "elements 0.25"]["no Triton"]["teraflops"]
    )
