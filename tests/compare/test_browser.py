"""The report in a real browser: every drawing is made, nothing fails, nothing runs out of a narrow screen."""

from __future__ import annotations

import csv
import importlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from sparsebp_cli.compare import REPORT_CURVES, Question, compare_runs
from sparsebp_cli.compare.archive import open_archive
from sparsebp_cli.compare.report import render_report
from sparsebp_cli.run import JournalWriter, RunFolder

pytestmark = pytest.mark.browser
MakeRun = Callable[..., RunFolder]
RESULTS = Path(__file__).parents[2] / "docs" / "results"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
FLAGS += ["--disable-component-update", "--virtual-time-budget=3000", "--enable-logging=stderr", "--v=0"]
# Written into the page after its own script; what it finds becomes the title.
PROBE = """<script>
/* Texts whose contrast to what is behind them is under 4.5 to 1. */
function pale() {
  const parts = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = rgb => rgb.slice(0, 3).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (let at = node; at; at = at.parentElement) {
      const rgb = parts(getComputedStyle(at).backgroundColor);
      if (rgb.length === 3 || rgb[3] === 1) return rgb;
    }
    return [255, 255, 255];
  };
  const hasText = n => [...n.childNodes].some(c => c.nodeType === 3 && c.data.trim());
  const texts = [...document.querySelectorAll("main *")].filter(hasText);
  return texts.filter(n => n.getClientRects().length).filter(n => {
    const style = getComputedStyle(n), ink = n.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [a, b] = [light(parts(ink)), light(behind(n))].sort((x, y) => y - x);
    return (a + .05) / (b + .05) < 4.5;
  }).map(n => `${n.tagName} ${n.textContent.trim().slice(0, 30)}`);
}
addEventListener("load", () => {
  const count = selector => document.querySelectorAll(selector).length;
  const choose = (box, value) => { box.value = value; box.dispatchEvent(new Event("change")); };
  const closed = document.documentElement.scrollWidth - innerWidth;
  const levels = [...document.querySelectorAll("h1,h2,h3,h4")].map(h => Number(h.tagName[1]));
  const skips = levels.filter((l, i) => i && l > levels[i - 1] + 1).length;
  location.hash = "#again";
  dispatchEvent(new Event("hashchange"));
  const unfolded = document.getElementById("again").open;
  const open = count("details[open]");
  document.querySelectorAll("details").forEach(d => { d.open = true; });
  repaint();
  const found = { closed, skips, tops: count("h1"), unfolded, open, pale: pale(),
    forest: count("#forest svg"), curves: count("#curves figure svg path[stroke]"),
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
  const ticks = () => [...document.querySelectorAll("#curves svg text")].map(t => t.textContent).join(" ");
  const press = title => [...document.querySelectorAll("#curves .tools button")].find(b => b.title === title).click();
  const whole = ticks();
  press("Closer");
  found.zoomed = [whole !== ticks(), document.activeElement.title];
  press("Show everything");
  found.zoomed.push(whole === ticks());
  const drawn = document.querySelector("#curves figure svg"), place = drawn.getBoundingClientRect();
  const drag = (kind, x, y) => drawn.dispatchEvent(new PointerEvent(kind, {
    clientX: place.x + x, clientY: place.y + y, pointerType: "mouse", button: 0 }));
  drawn.setPointerCapture = () => {};
  drag("pointerdown", 90, 50); drag("pointermove", 190, 150); drag("pointerup", 190, 150);
  found.zoomed.push(whole !== ticks());
  document.querySelector("#curves figure svg").dispatchEvent(new MouseEvent("dblclick"));
  found.zoomed.push(whole === ticks());
  found.saved = [];
  const contents = [];
  save = (name, blob) => { found.saved.push(name); contents.push(blob); };
  for (const where of ["#pareto", "#forest", "#curves", "#layers"]) {
    const kinds = [...document.querySelectorAll(`${where} .tools`)][0].querySelectorAll("button");
    [...kinds].filter(b => ["SVG", "CSV"].includes(b.textContent)).forEach(b => b.click());
  }
  Promise.all(contents.map(blob => blob.text())).then(texts => {
    found.files = texts;
    document.title = JSON.stringify(found);
    parent.postMessage(document.title, "*");
  });
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


# The narrowest window is 500 pixels wide: a telephone is a frame in it, which passes on what the probe found.
PHONE = """<!doctype html><body style="margin:0">
<iframe style="width:390px;height:880px;border:0" src="report.html"></iframe>
<script>addEventListener("message", event => { document.title = event.data; });</script></body>"""


def find_browser() -> str:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(found for name in names if (found := shutil.which(name)))


def look(page: Path, width: int, *, dark: bool) -> tuple[dict[str, Any], str]:
    """What the probe found, and what the browser complained about."""
    browser = find_browser()
    if width < 500:
        page = page.with_name("phone.html")
        page.write_text(PHONE, encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [browser, *FLAGS, scheme, f"--window-size={width},900", "--dump-dom", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    complaints = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(unescape(title[1])), complaints


def check_saved(files: dict[str, str]) -> None:
    """Each drawing is saved with its values, and as SVG that stands alone: text as text, no variable, no class."""
    assert len(files) == 7
    for name, text in files.items():
        if name.endswith(".svg"):
            assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
            assert "var(" not in re.sub(r' (fill|stroke)="[^"]*"', "", text)
            assert (" class=" in text, "<text" in text) == (False, True)
        else:
            heading, *rows = list(csv.reader(io.StringIO(text)))
            assert len(rows) >= 2
            assert {len(row) for row in rows} == {len(heading)}
    (drawn,) = (name for name in files if name.startswith("eval-loss-against-") and name.endswith(".csv"))
    rows = list(csv.DictReader(io.StringIO(files[drawn])))
    assert [(row["group"], row["eval/loss"][:5]) for row in rows if row["run"] == "mean"] == [
        ("dense", "3.004"),
        ("topk-rows", "3.108"),
    ]


@pytest.mark.parametrize("width", [1200, 768, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_every_drawing_is_made_and_answers(page: Path, width: int, dark: bool) -> None:
    found, complaints = look(page, width, dark=dark)
    assert complaints == ""
    assert found["closed"] <= 0
    assert found["overflow"] <= 0
    assert (found["tops"], found["skips"]) == (1, 0)
    assert found["pale"] == []
    assert (found["unfolded"], found["open"]) == (True, 1)
    assert (found["forest"], found["curves"], found["names"], found["heat"]) == (3, 10, 2, 2)
    assert found["keys"] == ["svg", "dense", "svg", "topk-rows"]
    assert (found["mean"], found["bands"], found["hidden"]) == (2, 2, 1)
    assert found["label"] == "train/loss against seconds of training, evaluation left out"
    assert found["tip"].startswith("dense\neval/loss 3.004 ± 0.032")
    check_saved(dict(zip(found["saved"], found["files"], strict=True)))
    assert found["zoomed"] == [True, "Closer", True, True, True]
    assert found["dark"] == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")


def test_a_report_of_eight_groups_prints_on_fewer_than_12_pages(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("dense", seed) for seed in range(3)]
    for n in range(7):
        policy = [{"name": "topk", "keep": 0.1 * (n + 1), "along": "rows"}]
        runs += [make_run(f"topk-rows-{n}", seed, policy=policy, exact=False, loss=3.1) for seed in range(3)]
    file, paper = tmp_path / "report.html", tmp_path / "report.pdf"
    file.write_text(render_report(compare_runs(runs, Question(curves=REPORT_CURVES))), encoding="utf-8")
    command = [find_browser(), *FLAGS, "--no-pdf-header-footer", f"--print-to-pdf={paper}", str(file)]
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    pages = re.findall(rb"/Type /Page\b(?!s)", paper.read_bytes())
    assert 2 <= len(pages) < 12


# What the first table hides in its box, and what the page hides in its window, becomes the title.
HIDDEN = """<script>addEventListener("load", () => {
  const boxes = [document.documentElement, document.querySelector(".scroll")];
  document.title = JSON.stringify({ hidden: boxes.map(box => box.scrollWidth - box.clientWidth) });
});</script>"""


@pytest.mark.parametrize("width", [1280, 1024, 820])
def test_no_column_of_the_first_table_is_cut_off_at_the_edge(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of the committed study has eleven groups and all columns."""
    monkeypatch.syspath_prepend(str(RESULTS.parents[1] / "benchmarks"))
    folder = open_archive(importlib.import_module("thin").find_archive(RESULTS / "quickstart"))
    runs = [RunFolder(plan.parent) for plan in sorted(folder.glob("runs/*/plan.json"))]
    report = render_report(compare_runs(runs, Question(baseline="dense", metric="test/loss", curves=REPORT_CURVES)))
    file = tmp_path / "report.html"
    file.write_text(report.replace("</body>", f"{HIDDEN}</body>"), encoding="utf-8")
    found, complaints = look(file, width, dark=False)
    assert (found, complaints) == ({"hidden": [0, 0]}, "")
