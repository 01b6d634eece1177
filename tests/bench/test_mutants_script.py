"""The mutants of guard code: each change is a module that Python can read, and the table names what exists."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TABLE = yaml.safe_load((ROOT / "benchmarks" / "mutants.yaml").read_text(encoding="utf-8"))
SOURCE = """\
LIMIT = 3

def find(path, wide):
    \"\"\"Say what.\"\"\"
    if path and len(path) < 2:
        raise ValueError
    close(path)
    return open(path, mode=1)
"""


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "benchmarks" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "mutants", module)  # dataclasses look it up
        spec.loader.exec_module(module)
    return module


def test_a_function_is_changed_in_one_place_at_a_time(mutants: ModuleType) -> None:
    condition = "if path and len(path) < 2:"
    assert sorted(change for change, _ in mutants.mutate(SOURCE)) == sorted(
        [
            f"{condition} -> return; {condition}",
            f"{condition} -> if (not (path and len(path) < 2)):",
            f"{condition} -> if path or len(path) < 2:",
            f"{condition} -> if path and len(path) <= 2:",
            f"{condition} -> if path and len(path) < 3:",
            "raise ValueError -> pass",
            "close(path) -> pass",
            "return open(path, mode=1) -> return open(path, mode=2)",
            "return open(path, mode=1) -> return open(path, )",
        ]
    )


@pytest.mark.parametrize("name", TABLE)
def test_the_table_names_files_tests_and_places_that_exist(mutants: ModuleType, name: str) -> None:
    row = TABLE[name]
    tests = [word.removeprefix("--deselect=").partition("::")[0] for word in row["tests"]]
    assert [file for file in (*row["files"], *tests) if not (ROOT / file).exists()] == []
    found = mutants.list_mutants(name, row, "a seed", 10_000)
    assert len(found) > len(row["named"])
    for mutant in found:
        ast.parse(mutant.source)
    assert mutants.list_mutants(name, row, "a seed", 5) == mutants.list_mutants(name, row, "a seed", 5)
