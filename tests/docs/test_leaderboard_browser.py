"""The leaderboard's page in a browser: no screen is too narrow for it, and its tables sort."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.compare.test_browser import FLAGS
from tests.docs.block import ROOT

RESULTS = ROOT / "docs" / "results"
PAGE = (RESULTS / "leaderboard" / "v0.html").read_text(encoding="utf-8")
PROBE = """<script>addEventListener("load", () => {
  const read = (table, column) => [...table.tBodies[0].rows].map((row) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : cell.dataset.value;
  });
  const tables = [...document.querySelectorAll("section table")].map((table) => [...table.tHead.rows[0].cells].map(
    (head, column) => {
      const press = () => { (head.querySelector("button") || head).click(); return read(table, column); };
      return {name: head.textContent.trim(), before: read(table, column), once: press(), twice: press(),
              said: head.getAttribute("aria-sort")};
    }));
  const wide = document.documentElement.scrollWidth - innerWidth;
  const hidden = [...document.querySelectorAll(".scroll")].map((each) => each.scrollWidth - each.clientWidth);
  document.title = JSON.stringify({wide, hidden, tables});
});</script>"""


def open_page(folder: Path, width: int, page: str = PAGE) -> dict[str, object]:
    """What the page's probe has seen in a window of this width."""
    file = folder / "page.html"
    if "script-src" not in page:  # the page has no script of its own
        page = page.replace("style-src 'unsafe-inline'", "style-src 'unsafe-inline'; script-src 'unsafe-inline'")
    file.write_text(page.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    browser = next(found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name)))
    command = [browser, *FLAGS, f"--window-size={width},900", "--dump-dom", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout, re.DOTALL)
    assert title is not None, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr
    seen: dict[str, object] = json.loads(title[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    return seen


def order(values: list[str]) -> list[float | str]:
    """Numbers as numbers; empty cells are left out, for they may stand at either end."""
    filled = [value for value in values if value]
    try:
        return [float(value) for value in filled]
    except ValueError:
        return [value.lower() for value in filled]


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 500])
def test_no_screen_is_too_narrow_and_every_column_sorts_both_ways(tmp_path: Path, width: int) -> None:
    seen = open_page(tmp_path, width)
    assert seen["wide"] <= 0  # type: ignore[operator]
    tables = seen["tables"]
    assert isinstance(tables, list)
    assert len(tables) >= 2
    for columns in tables:
        assert len(columns) == 12
        for column in columns:
            once, twice = order(column["once"]), order(column["twice"])
            assert sorted(column["once"]) == sorted(column["before"]) == sorted(column["twice"]), column["name"]
            assert once in (sorted(once), sorted(once, reverse=True)), column["name"]
            assert twice == (sorted(twice, reverse=True) if once == sorted(once) else sorted(twice)), column["name"]
            assert column["said"] in ("ascending", "descending"), column["name"]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> str:
    """Version 1 as it is when every task is trained, with the longest words that it has."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page, result = (importlib.import_module(name) for name in ("leaderboard_page", "leaderboard_result"))
    monkeypatch.setattr(result, "read_result", lambda folder, name: make_result(result, folder, name))
    found: str = page.render(result.read_results())
    return found


def make_result(result: ModuleType, folder: Path, name: str) -> object:
    study = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    numbers = ("price", "noise", "bias", "product")
    worth: dict[str, object] = {key: {"value": 3.37} for key in numbers}
    worth |= {"noise_curved": None, "product_curved": None, "verdict": "cannot beat a smaller batch"}
    rows = [
        result.Row(
            *(arm, arm in result.CONTROLS, arm == "dense", "best control" if arm == "dense" else "no difference shown"),
            *(1.2345, 0.0123, 5, 0.123, -0.123, 0.345, 16, 0.0003333, 1842, 1.0, 1.05, "4 of 5 runs", worth),
        )
        for arm in study["arms"]
    ]
    return result.Result(name, name, study, tuple(rows), "test/loss", "dense", measured="16, 0.001")


@pytest.mark.browser
@pytest.mark.parametrize("width", [1200, 500])
def test_every_task_of_version_1_fits_and_nothing_scrolls_where_there_is_room(
    tmp_path: Path, width: int, full: str
) -> None:
    seen = open_page(tmp_path, width, full)
    hidden = seen["hidden"]
    assert isinstance(hidden, list)
    assert len(hidden) == 7  # matrix, picture and five tasks
    assert seen["wide"] <= 0  # type: ignore[operator]
    if width == 1200:
        assert max(hidden) <= 0
