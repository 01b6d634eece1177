"""The leaderboard's page in a browser: no screen is too narrow for it, and its tables sort."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.auditor.test_page import FLAGS
from tests.docs.block import ROOT

PAGE = ROOT / "docs" / "results" / "leaderboard" / "v0.html"
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
  document.title = JSON.stringify({wide, tables});
});</script>"""


def open_page(folder: Path, width: int) -> dict[str, object]:
    """What the page's probe has seen in a window of this width."""
    file = folder / "page.html"
    file.write_text(PAGE.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
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
