"""What an audit does itself grows with what it watches, and no faster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import ItemsView, ValuesView
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sparsebp_audit
from sparsebp_audit.auditor.parameter import ParameterHistory

ROOT = Path(__file__).resolve().parents[3]


class Scanned(dict[Tensor, ParameterHistory]):
    """Parameters, and how often somebody went through all of them."""

    scans = 0

    def values(self) -> ValuesView[ParameterHistory]:  # type: ignore[override]
        self.scans += 1
        return super().values()  # type: ignore[return-value]

    def items(self) -> ItemsView[Tensor, ParameterHistory]:  # type: ignore[override]
        self.scans += 1
        return super().items()  # type: ignore[return-value]


@pytest.mark.parametrize("depth", [2, 12])
def test_one_optimizer_a_parameter_makes_no_scan_of_all_for_each(depth: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    audit = sparsebp_audit.audit(model)
    parameters = audit._session.parameters
    parameters.histories = histories = Scanned(parameters.histories)
    with audit:
        for _ in range(3):
            model(torch.randn(2, 4)).square().mean().backward()
    assert histories.scans <= 3 * 2  # before and after each backward pass
    report = audit.report()
    assert (report.steps, report.findings) == (3, ())
    assert report.gradient_bytes == 4 * depth * (4 * 4 + 4)  # although each was freed inside the pass


def test_the_benchmark_takes_turns_and_is_left_alone_afterwards(tmp_path: Path) -> None:
    out = tmp_path / "audit.json"
    command = [sys.executable, "benchmarks/audit.py", "--tiny", "--out", str(out), "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    (model,) = result["models"]
    assert [way["name"] for way in model["ways"]] == ["alone", "watched", "left alone again"]
    assert all(way["step_seconds"]["number"] == result["rounds"] * result["steps"] for way in model["ways"])
    assert model["operators_a_step"] > 100
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
