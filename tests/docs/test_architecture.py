"""ARCHITECTURE.md names rooms, files, functions and counts that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from types import ModuleType

import pytest

from benchmarks import house
from tests.docs.block import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MENTION = re.compile(r"`((?:\w+/)*\w+\.py)(?::([\w.]+))?`")
COUNTS = re.compile(r"^\| `(\w+)` \|.*\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


def find_missing(text: str) -> list[str]:
    """Return each ``path.py`` and ``path.py:name`` of a text that is neither in the package nor in the repository."""
    missing = []
    for path, name in MENTION.findall(text):
        file = next((place for folder in (*house.PACKAGES, ".") if (place := ROOT / folder / path).is_file()), None)
        if file is None or (name and name not in find_definitions(ast.parse(file.read_text(encoding="utf-8")))):
            missing.append(f"{path}:{name}" if name else path)
    return missing


def find_definitions(node: ast.AST, prefix: str = "") -> set[str]:
    """Return the qualified names of the functions and classes below a node."""
    found = set[str]()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            name = f"{prefix}{child.name}"
            found |= {name} | find_definitions(child, f"{name}.")
        elif not isinstance(child, ast.expr):
            found |= find_definitions(child, prefix)
    return found


def read_walk(heading: str) -> str:
    return PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def hops() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import hops  # type: ignore[import-not-found]

        return hops


def test_every_file_and_function_that_the_page_names_exists() -> None:
    assert len(MENTION.findall(PAGE)) > 80
    assert find_missing(PAGE) == []


def test_a_file_or_function_that_is_gone_would_be_found() -> None:
    here = "backward/core/engine.py"
    assert find_missing(f"`{here}` `{here}:Engine.backward` `benchmarks/hops.py:main`") == []
    assert find_missing(f"`{here}:decide` `backward/none.py`") == [f"{here}:decide", "backward/none.py"]


def test_the_drawing_has_every_room_in_its_layer() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    drawing = read_walk("Rooms and layers").partition("```text\n")[2].partition("```")[0]
    lines = [line.partition("  ")[0] for line in drawing.splitlines() if line.strip() and not line.startswith(" ")]
    assert lines == contract[0]["layers"]


@pytest.mark.parametrize("path", ["linear", "pass", "lossless", "eager", "step", "compare"])
def test_the_counts_of_the_page_are_those_that_the_script_measures(hops: ModuleType, path: str) -> None:
    shown = {name: tuple(map(int, numbers)) for name, *numbers in COUNTS.findall(PAGE)}
    calls = hops.PATHS[path][1]()
    files, functions, num_calls, num_hops = shown[path]
    assert (files, functions, num_hops) == (len(calls.files), len(calls.counts), calls.num_hops)
    assert num_calls == pytest.approx(calls.num_calls, rel=0.01)  # PyTorch 2.11 calls two more


def test_the_walk_of_a_gradient_names_every_file_that_runs(hops: ModuleType) -> None:
    walk = read_walk("A gradient at one linear")
    named = {path for path, _ in MENTION.findall(walk)}
    assert [file for file in hops.count_linear().files if file not in named] == []
