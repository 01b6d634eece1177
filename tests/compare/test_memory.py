"""The peak memory of measured steps in `show` and `compare`, also in runs of 0.5 that recorded its parts and curve."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsebp_cli.cli.app import app
from sparsebp_cli.compare import compare_runs, render
from sparsebp_cli.compare.report import render_report
from sparsebp_cli.run import JournalWriter, RunFolder

MakeRun = Callable[..., RunFolder]
TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.25}], "exact": False}
PARTS = ("weight", "gradient", "optimizer", "activation", "workspace")
MEGA = 1_000_000


def measured(run: RunFolder, *peaks: int) -> RunFolder:
    """Add measured steps, as 0.5 wrote them, to a run's event log: the first at step 3; peaks in megabytes."""
    with JournalWriter(run.path, durable=False) as journal:
        for step, peak in zip((3, 20), peaks, strict=False):
            parts = [peak * MEGA, 0, 0, 0, 0]
            columns = ["microseconds", "phase", "weights", "gradients", "optimizer", "activations", "workspace"]
            curve = {"columns": columns, "points": [[0, 0, *parts]], "highest": parts, "allocator_peak_bytes": None}
            journal.write("memory", step=step, values=curve)
            names = [f"memory/step_peak_{part}_bytes" for part in PARTS]
            values = {"memory/step_peak_bytes": sum(parts), **dict(zip(names, parts, strict=True))}
            journal.write("metrics", step=step, values=values)
    return run


def test_a_step_without_a_time_counts_as_the_median_of_the_others(make_run: MakeRun) -> None:
    plain, other = make_run("dense", 0), make_run("other", 0, **TOPK, claimed=0.1)
    lines = (other.path / "journal.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if record["kind"] == "metrics" and record["step"] == 20:
            record["values"] = {k: v for k, v in record["values"].items() if not k.startswith(("time/", "throughput/"))}
    (other.path / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    a, b = (group.speed for group in compare_runs([plain, measured(other, 100, 100)]).groups)
    assert a.training_seconds is not None
    assert b.training_seconds is not None
    assert b.training_seconds.mean == pytest.approx(a.training_seconds.mean, rel=0.02)


def test_a_run_of_0_5_keeps_its_peak_and_its_parts_are_ignored(make_run: MakeRun) -> None:
    dense = measured(make_run("dense", 0), 900, 800)
    comparison = compare_runs([dense, measured(make_run("sparse", 0, **TOPK), 420, 450)])
    assert [group.cost.held_bytes for group in comparison.groups] == [900 * MEGA, 450 * MEGA]
    assert "| dense | 900 MB |" in render(comparison, "md")
    assert "Memory of one step" not in render_report(comparison)
    done = CliRunner().invoke(app, ["show", dense.run_id, "--all"])
    assert done.exit_code == 0, done.output
    assert "tensors of a step: 800 MB at most" in " ".join(done.output.split())
    told = json.loads(CliRunner().invoke(app, ["show", dense.run_id, "-o", "json"]).output)
    assert "memory" not in told
    assert told["metrics"]["memory/step_peak_weight_bytes"]["last"] == 800 * MEGA
