"""The notebook runs from its first cell to its last, and prints what is stored in it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.docs.block import LINK, ROOT

FILE = ROOT / "docs" / "notebook" / "loop.ipynb"
CELLS: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
NUMBER = re.compile(r"\d+(\.\d+)?(e-?\d+)?")


def _mask(text: str) -> str:
    """Text without its numbers, whose last digits are those of a processor."""
    return NUMBER.sub("#", text)


def test_every_cell_runs_and_prints_what_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "notebook"}
    printed = 0
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] != "code":
            continue
        exec(compile("".join(cell["source"]), f"{FILE.name}:{number}", "exec"), names)
        stored = "".join(line for output in cell["outputs"] for line in output["text"])
        assert _mask(capsys.readouterr().out) == _mask(stored)
        printed += bool(stored)
    assert printed == 3
    assert (names["sparse"] - names["dense"]).abs().max() < 1e-5 * names["dense"].abs().max()
    assert not names["kept"].allclose(names["dense"])


def test_its_links_lead_to_pages() -> None:
    text = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    links = [link for link, _ in LINK.findall(text)]
    assert links
    assert [link for link in links if not (FILE.parent / link).is_file()] == []
