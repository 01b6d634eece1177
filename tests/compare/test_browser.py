"""The report in a real browser: every drawing is made, nothing fails, nothing runs out of a narrow screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from sparsebp_cli.compare import REPORT_CURVES, Question, compare_runs
from sparsebp_cli.compare.report import render_report
from sparsebp_cli.run import JournalWriter, RunFolder

pytestmark = pytest.mark.browser
MakeRun = Callable[..., RunFolder]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
FLAGS += ["--disable-component-update", "--virtual-time-budget=3000", "--enable-logging=stderr", "--v=0"]
# Written into the page after its own script; what it finds becomes the title.
PROBE = """<script>
addEventListener("load", () => {
  const count = selector => document.querySelectorAll(selector).length;
  const choose = (box, value) => { box.value = value; box.dispatchEvent(new Event("change")); };
  const found = { forest: count("#forest svg"), curves: count("#curves figure svg path[stroke]"),
    names: count("#pareto text.name"), heat: count("#layers canvas"),
    overflow: document.documentElement.scrollWidth - innerWidth,
    keys: [...document.querySelectorAll(".keys button")].flatMap(b => [...b.childNodes].map(n => n.tagName || n.data)),
    dark: getComputedStyle(document.body).backgroundColor };
  const [metric, axis, shown] = document.querySelectorAll("#curves select");
  choose(metric, "train/loss"); choose(axis, "2"); choose(shown, "mean");
  found.mean = count("#curves figure svg path[stroke]");
  found.bands = count("#curves figure svg path[opacity='0.18']");
  found.label = document.querySelector("#curves figure svg").getAttribute("aria-label");
  document.querySelector("#curves button").click();
  found.hidden = count("#curves figure svg path[stroke]");
  const svg = document.querySelector("#pareto svg"), box = svg.getBoundingClientRect();
  const mark = svg.querySelector("g circle").getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: mark.x + 4, clientY: mark.y + 4 }));
  found.tip = document.querySelector("#pareto .tip").textContent;
  document.title = JSON.stringify(found);
});
</script>"""


@pytest.fixture
def page(two_groups: list[RunFolder], make_run: MakeRun, tmp_path: Path) -> Path:
    """A report of two groups with layers, and the probe."""
    for run in two_groups[5:]:
        with JournalWriter(run.path) as journal:
            values = {f"model.layers.{n}": {"kept_share": n / 9, "cosine": 0.9} for n in range(9)}
            journal.write("layers", step=10, values=values)
    text = render_report(compare_runs(two_groups, Question(margin=0.2, curves=REPORT_CURVES)))
    file = tmp_path / "report.html"
    file.write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    return file


def look(page: Path, width: int, *, dark: bool) -> tuple[dict[str, Any], str]:
    """What the probe found, and what the browser complained about."""
    browser = next(found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name)))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [browser, *FLAGS, scheme, f"--window-size={width},900", "--dump-dom", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    complaints = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(unescape(title[1])), complaints


@pytest.mark.parametrize("width", [1200, 500])
@pytest.mark.parametrize("dark", [False, True])
def test_every_drawing_is_made_and_answers(page: Path, width: int, dark: bool) -> None:
    found, complaints = look(page, width, dark=dark)
    assert complaints == ""
    assert found["overflow"] <= 0
    assert (found["forest"], found["curves"], found["names"], found["heat"]) == (3, 10, 2, 2)
    assert found["keys"] == ["svg", "dense", "svg", "topk-rows"]
    assert (found["mean"], found["bands"], found["hidden"]) == (2, 2, 1)
    assert found["label"] == "train/loss against seconds of training, evaluation left out"
    assert found["tip"].startswith("dense\neval/loss 3.004 ± 0.032")
    assert found["dark"] == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")
