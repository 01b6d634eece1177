"""The memory of watched steps in `show` and `compare`: tables, pictures, the report; and where none was watched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsebp_cli.cli.app import app
from sparsebp_cli.compare import Comparison, View, compare_runs, render
from sparsebp_cli.compare.report import render_report
from sparsebp_cli.run import JournalWriter, RunFolder
from sparsebp_cli.run.memory import MemoryCurve, MemoryPoint, MemorySplit

from .test_browser import look

MakeRun = Callable[..., RunFolder]
TOPK: dict[str, Any] = {"policy": [{"name": "topk", "keep": 0.25}], "exact": False}
NAMES = [f"memory/step_peak_{part}_bytes" for part in ("weight", "gradient", "optimizer", "activation", "workspace")]
MEGA = 1_000_000


def curve(activations: int) -> MemoryCurve:
    """Of a step with this much saved at its peak, in megabytes."""
    rest = {"weights": 100 * MEGA, "optimizer": 200 * MEGA}
    return MemoryCurve(
        (
            MemoryPoint(0.0, "forward", MemorySplit(**rest)),
            MemoryPoint(0.010, "forward", MemorySplit(**rest, activations=activations * MEGA)),
            MemoryPoint(0.011, "backward", MemorySplit(**rest, activations=activations * MEGA, workspace=7 * MEGA)),
            MemoryPoint(0.030, "backward", MemorySplit(**rest, gradients=100 * MEGA)),
            MemoryPoint(0.031, "update", MemorySplit(**rest, gradients=100 * MEGA, workspace=1 * MEGA)),
            MemoryPoint(0.040, "update", MemorySplit(**rest)),
        )
    )


def watched(run: RunFolder, *activations: int) -> RunFolder:
    """Add watched steps, the first at step 3, to a run's journal."""
    with JournalWriter(run.path, durable=False) as journal:
        for step, amount in zip((3, 20), activations, strict=False):
            found = curve(amount)
            values = found.to_values() | {"allocator_peak_bytes": None}
            split = found.peak.split
            journal.write("memory", step=step, values=values)
            numbers = zip(NAMES, [split.weights, 0, split.optimizer, split.activations, split.workspace], strict=True)
            journal.write("metrics", step=step, values={"memory/step_peak_bytes": split.total} | dict(numbers))
    return run


@pytest.fixture
def comparison(make_run: MakeRun) -> Comparison:
    """Dense, of which the first watched step is the higher one, and a policy; both with a seed that was not watched."""
    runs = [watched(make_run("dense", 0), 500, 400), make_run("dense", 1), make_run("sparse", 1, **TOPK)]
    return compare_runs([*runs, watched(make_run("sparse", 0, **TOPK), 120, 130)])


def test_the_peak_is_the_highest_of_all_watched_steps_and_the_curve_the_last_one(comparison: Comparison) -> None:
    dense, sparse = comparison.groups
    assert dense.cost.step_peak == MemorySplit(100 * MEGA, 0, 200 * MEGA, 500 * MEGA, 7 * MEGA)
    assert sparse.cost.step_peak == MemorySplit(100 * MEGA, 0, 200 * MEGA, 130 * MEGA, 7 * MEGA)
    assert dense.memory is not None
    assert (dense.memory.step, dense.memory.curve) == (20, curve(400))


def test_both_tables_of_memory_are_told(comparison: Comparison) -> None:
    text = render(comparison, "md", View("memory"))
    assert "| dense | 807 MB | 100 MB | 0.00 B | 200 MB | 500 MB | 7.00 MB |" in text
    assert "| sparse | 437 MB | 100 MB | 0.00 B | 200 MB | 130 MB | 7.00 MB |" in text
    assert text.index("### Memory\n") < text.index("### Memory of one step at its peak")
    whole = json.loads(render(comparison, "json"))
    assert whole["groups"][0]["cost"]["step_peak"]["activations"] == 500 * MEGA
    assert "group,cost.step_peak.workspace" in re.sub(
        r"(?m)^(group),.*?,(cost\S*?),.*$", r"\1,\2", render(comparison, "csv")
    )


def test_a_step_without_a_time_counts_as_the_median_of_the_others(make_run: MakeRun) -> None:
    plain, other = make_run("dense", 0), make_run("other", 0, **TOPK, claimed=0.1)
    lines = (other.path / "journal.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if record["kind"] == "metrics" and record["step"] == 20:
            record["values"] = {k: v for k, v in record["values"].items() if not k.startswith(("time/", "throughput/"))}
    (other.path / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    a, b = (group.speed for group in compare_runs([plain, watched(other, 100, 100)]).groups)
    assert a.training_seconds is not None
    assert b.training_seconds is not None
    assert b.training_seconds.mean == pytest.approx(a.training_seconds.mean, rel=0.02)


def test_show_tells_the_split(make_run: MakeRun) -> None:
    run = watched(make_run("dense", 0), 500, 400)
    done = CliRunner().invoke(app, ["show", run.run_id, "--all"])
    assert done.exit_code == 0, done.output
    rows = {
        cells[0]: cells[1:] for line in done.output.splitlines() if len(cells := re.split(r" {2,}", line.strip())) > 4
    }
    assert rows["saved activations"] == ["400 MB", "56.6 %", "400 MB", "400 MB", "400 MB", "0 B"]
    assert rows["gradients"] == ["0 B", "0 %", "100 MB", "0 B", "0 B", "100 MB"]
    assert "step 20, with the peak in the backward" in done.output
    assert "a step's tensors 707 MB at most" in " ".join(done.output.split())
    assert all(len(line) <= 100 for line in done.output.splitlines() if "memory" in line)
    told = CliRunner().invoke(app, ["show", run.run_id, "-o", "json"])
    assert list(json.loads(told.output)["memory"]) == ["3", "20"]


def test_the_report_has_the_curves_as_data_and_their_peaks_in_a_table(
    comparison: Comparison, make_run: MakeRun
) -> None:
    text = render_report(comparison)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert [(entry["label"], entry["step"], len(entry["points"])) for entry in data["memory"]] == [
        ("dense", 20, 6),
        ("sparse", 20, 6),
    ]
    assert "Memory of one step at its peak" in text
    assert "<div id=memory>" in text
    assert "<div id=memory>" not in render_report(compare_runs([make_run("dense", 9)]))


PROBE = """<script>
addEventListener("load", () => {
  const found = { drawings: document.querySelectorAll("#memory svg").length,
    parts: document.querySelectorAll("#memory path.part").length,
    words: [...document.querySelectorAll("#memory text")].map(text => text.textContent),
    overflow: document.documentElement.scrollWidth - innerWidth };
  const svg = document.querySelector("#memory svg"), box = svg.getBoundingClientRect();
  const mark = svg.querySelector("circle").getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: mark.x + 4, clientY: mark.y + 4 }));
  found.tip = document.querySelector("#memory .tip").textContent;
  document.title = JSON.stringify(found);
});
</script>"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 500])
def test_the_report_draws_part_upon_part_in_a_browser(comparison: Comparison, tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_report(comparison).replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    found, complaints = look(page, width, dark=False)
    assert complaints == ""
    assert found["overflow"] <= 0
    assert (found["drawings"], found["parts"]) == (2, 10)
    assert {"forward", "backward", "update", "peak 707 MB", "peak 437 MB"} <= set(found["words"])
    assert found["tip"].startswith("backward, 707 MB in all\nweights 100 MB\ngradients 0 B")
